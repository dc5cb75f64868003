import pytest


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, as matplotlib objects."""
    from matplotlib.figure import Figure  # takes 0.4 s, in each process that collects the tests

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    return figures
