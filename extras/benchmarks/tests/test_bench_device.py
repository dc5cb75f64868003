"""extras/benchmarks/bench_device.py with almost no work: what it writes, and what it refuses."""

import json

import pytest

from tests.later import Later

bench = Later("extras.benchmarks.bench_device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_row_is_measured_and_compared_with_the_limit(tmp_path, capsys, device):
    path = tmp_path / "rows.json"
    bench.main(["--tiny", "--device", device, "--workers", "1", "--steps", "2", "--json", str(path)])
    result, table = json.loads(path.read_text()), capsys.readouterr().out
    assert (result["model"], result["batch_size"], result["num_workers"]) == ("tiny", 8, 1)
    assert [row["loader"] for row in result["rows"]] == ["limit", "ready", "torch", "workers", "prefetch"]
    for row in result["rows"]:
        assert row["images_per_second"] == pytest.approx(8 * row["steps_per_second"]) and 0 <= row["idle"] <= 1
        assert row["loader"] in table
    assert result["rows"][0]["ratio_to_limit"] == 1


def test_a_modelled_device_hides_its_copies_behind_longer_steps(capsys):
    assert bench.hidden_share(copy=0.01, step=0.1, host=0.02, depth=0) == pytest.approx(0)
    assert bench.hidden_share(copy=0.01, step=0.1, host=0.02, depth=2) >= 0.98
    assert bench.hidden_share(copy=0.1, step=0.01, host=0.02, depth=2) < 0.3  # the copies are the bottleneck
    bench.main(["--tiny", "--workers", "1", "--steps", "2", "--modelled", "25", "100"])
    assert "hidden" in capsys.readouterr().out
