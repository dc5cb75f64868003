"""PyTorch's own tests of DataLoader pass with WorkerLoader in its place, but for the table in loaders/README.md.

Its wheel has no tests: `git clone --depth 1 --branch v2.6.0 https://github.com/pytorch/pytorch`, or get your
distribution's source package (`apt-get source pytorch`). Then `pip install expecttest`, and 10 to 30 minutes of
`PYTORCH_SOURCE=path/to/pytorch ./scripts/test -n 0 -m slow tests/loaders/test_torchs_own.py`.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = os.environ.get("PYTORCH_SOURCE")
WITH_OURS = "import loaders, torch.utils.data; torch.utils.data.DataLoader = loaders.WorkerLoader\n"
# The tests that fail with our class alone, and the row of the guide's table that explains it.
EXPLAINED = {
    "test_worker_init_fn": "random numbers",  # a sample is the seed that worker_init_fn has set
    "test_ind_worker_queue": "which worker reads",  # by chance it may pass
}


def outcomes(folder, header, names=""):
    """Runs PyTorch's tests in other processes, `header` before their source. Returns by name whether they pass."""
    source = (Path(SOURCE or "") / "test" / "test_dataloader.py").read_text()
    source = source.replace("JOIN_TIMEOUT = 60.0", "JOIN_TIMEOUT = 600.0")  # for a busy machine
    folder.mkdir()
    (folder / "test_dataloader.py").write_text(header + source)
    command = [sys.executable, "-m", "pytest", "-q", "-n2", "-p", "no:randomly", "-c", os.devnull, "-k", names]
    command += ["--timeout=900", "--junitxml=report.xml", "test_dataloader.py"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {**os.environ, "PYTHONPATH": paths, "PYTORCH_TEST_WITH_SLOW": "1"}
    process = subprocess.Popen(command, cwd=folder, env=settings, start_new_session=True)
    try:
        process.wait(3600)
    finally:
        with suppress(ProcessLookupError):  # a failed test may leave processes behind
            os.killpg(process.pid, signal.SIGKILL)
    passed = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        failures = [*case.iter("failure"), *case.iter("error")]
        passed[case.attrib["name"]] = passed.get(case.attrib["name"], True) and not failures  # several classes have it
    return passed


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not SOURCE, reason="PYTORCH_SOURCE is not set to the folder of PyTorch's source")
def test_pytorchs_own_tests_pass_but_for_what_the_guide_explains(tmp_path):
    ours = outcomes(tmp_path / "ours", WITH_OURS)
    failed = {name for name, passed in ours.items() if not passed}
    torchs = outcomes(tmp_path / "torch", "", " or ".join(failed))  # not all fit the installed version
    assert len(ours) > 100 and failed <= torchs.keys()
    assert {name for name in failed if torchs[name]} <= EXPLAINED.keys()
    assert all(f"\n| {row} |" in (ROOT / "loaders" / "README.md").read_text() for row in EXPLAINED.values())
