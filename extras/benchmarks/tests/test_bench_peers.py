"""extras/benchmarks/bench_peers.py without its peers: what it writes, and which rows it leaves out."""

import pytest

from tests.data.fakes import write_images
from tests.later import Later

bench = Later("extras.benchmarks.bench_peers")


@pytest.fixture
def images(tmp_path, monkeypatch, python):
    """A folder of 64 images, and a bench of one round that reads no packs."""

    def start_quickly(command, **_):
        return python.run(*command[1:], cwd=tmp_path, timeout=100)

    monkeypatch.setattr("extras.benchmarks.bench_peers.run", start_quickly)
    monkeypatch.setattr("extras.benchmarks.bench_peers.ROUNDS", 1)
    monkeypatch.setattr("extras.benchmarks.bench_peers.PACKS", {})
    monkeypatch.setattr("extras.benchmarks.bench_peers.ENVIRONMENTS", tmp_path / "nothing")
    return write_images(tmp_path / "images", ("cat",), count=64)


@pytest.mark.slow
def test_an_installed_loader_is_measured_and_a_missing_peer_is_left_out_with_the_reason(images, tmp_path, monkeypatch):
    rows = {f"{row}, files": (row, "files") for row in ("workers", "ffcv")}
    monkeypatch.setattr("extras.benchmarks.bench_peers.ROWS", rows)
    bench.main(["--data-root", str(images), "--workers", "1", "--seconds", "0.1", "--out", str(tmp_path)])
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "peers.md").read_text()
    (row,) = (line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| Worker"))
    assert row[0].strip() == "WorkerLoader" and float(row[3].replace(",", "")) > 0 and float(row[5]) == 1
    assert "Left out: ffcv, files: run `python extras/benchmarks/bench_peers.py --setup ffcv` first" in table
