from types import SimpleNamespace

import pytest

from tests.configs import composed
from training.config import checked
from training.finished.warning import TrustWarning


@pytest.mark.parametrize(
    ("setting", "trust"),
    [
        ("task.loss={_target_: fractions.Fraction}", "fractions"),
        ("schedule._target_=fractions.gcd", "fractions"),
        ("task.loss={_target_: torch.nn.L1Loss}", ""),
    ],
)
def test_a_run_says_at_its_start_what_its_finished_network_will_need(setting, trust, caplog):
    TrustWarning().on_start(SimpleNamespace(config=checked(composed(setting))))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(trust)
    if trust:
        assert f"if you trust it, add --trust {trust} to evaluate.py" in warnings[0]
        assert warnings[0].endswith(f"and train.trust=[{trust}] to resume")
