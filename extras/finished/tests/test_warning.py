from types import SimpleNamespace

import pytest

from tests.configs import composed
from training.config import checked
from training.finished.warning import TrustWarning


@pytest.mark.parametrize(
    ("settings", "options", "names"),
    [
        (["task.loss={_target_: fractions.Fraction}"], "--trust fractions", "fractions"),
        (["schedule._target_=statistics.mean"], "--trust statistics", "statistics"),
        (
            ["schedule._target_=statistics.mean", "task.loss={_target_: os.path.join}"],
            "--trust os.path --trust statistics --trust task.loss._target_",  # os.path's functions lie in posixpath
            "os.path,statistics,task.loss._target_",
        ),
        (["task.loss={_target_: torch.nn.L1Loss}"], "", ""),
    ],
)
def test_a_run_says_at_its_start_what_its_finished_network_will_need(settings, options, names, caplog):
    TrustWarning().on_start(SimpleNamespace(config=checked(composed(*settings))))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(names)
    if names:
        assert f"if you trust it, add {options} to evaluate.py" in warnings[0]
        assert warnings[0].endswith(f"and train.trust=[{names}] to resume")
