"""Breaks the device path, one line at a time, and checks that the tests on the simulated GPU notice each.

`python tests/loaders/preload/mutants.py` takes minutes; it changes a copy of the repository.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
COPY = "loaders/preload/device_copy.py"
EPOCH, RELEASE = "loaders/preload/epoch.py", "self._copier.release_copied(wait=True)"
TRANSFER = "loaders/preload/transfer.py"
HOLD = "self._copies.append((done, held))"
MOVE = '            with self._timed("copy", batch_id):\n                prepared = self._moved(batch)\n'
EARLY = "            early = self._stream and self._stream.record_event()\n"
RECORD = "tensor.record_stream(consumer)"
FINALLY = "        finally:  # after an error too"
ERROR = "        except ValueError:\n            raise\n        else:  # after an error too"
BEGIN = "self._stream.wait_stream(self._accelerator.current_stream())"

# What is replaced, by what: (file, before, after) each.
MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "no host batch is held": [(COPY, HOLD, "pass")],
    "the oldest is released early": [
        (COPY, "wait or self._copies[0][0].query()", "wait or len(self._copies) > 1"),
        (COPY, "            event.synchronize()", "            _ = wait and event.synchronize()"),
    ],
    "only the newest is held": [(COPY, HOLD, f"self._copies.clear(), {HOLD}")],
    "its event comes before the copy": [
        (COPY, MOVE, EARLY + MOVE),
        (COPY, HOLD, HOLD.replace("done", "early or done")),
    ],
    "the thread is on the default stream": [(COPY, "accelerator.using(self._stream)", "accelerator.using(None)")],
    "the consumer's stream does not wait": [(COPY, "consumer.wait_event(ready)", "pass")],
    "no record_stream": [(COPY, RECORD, "pass")],
    "record_stream on the side stream": [(COPY, RECORD, RECORD.replace("consumer", "self._stream"))],
    "ready before the transform": [
        (COPY, MOVE, MOVE + EARLY),
        (COPY, "None if self._stream is None else done", "early"),
    ],
    "no wait at the end": [
        (EPOCH, f"finally:\n            {RELEASE}", "finally:\n            self._copier._copies.clear()")
    ],
    "an error drops the hold": [(COPY, FINALLY, ERROR)],
    "no begin": [(COPY, BEGIN, "pass")],
    "begin before iter()": [
        (COPY, BEGIN, "pass"),
        (COPY, "batches = iter(loader)", f"_ = self._stream and {BEGIN}; batches = iter(loader)"),
    ],
    "released before the transform": [(COPY, MOVE, MOVE + EARLY), (COPY, HOLD, HOLD.replace("done", "early or done"))],
    "what an object held is released": [(COPY, "held = batch, list(tensors(batch))", "held = batch")],
    "what an object holds is not recorded": [
        ("loaders/nested.py", "objects.append(batch)", "hasattr(batch, 'to') and objects.append(batch)")
    ],
    "the consumer gets a slot": [(COPY, "prepared = unlocked(prepared)", "pass")],
    "the loader holds for ever": [(COPY, "loader.holds_batches_until_copied = False", "pass")],
    "the current device's events": [
        ("loaders/preload/accelerator.py", "event.record(stream or self.current_stream())", "event.record(stream)")
    ],
    "a slot is taken for torch's pinned memory": [(TRANSFER, "pin_memory(unlocked(batch))", "pin_memory(batch)")],
    "tensors of one copy share a version": [(TRANSFER, ", view.data", ", view")],
    "a tensor of one copy is another's": [(TRANSFER, "// width)", "// width * 0)")],
    "small tensors keep large ones": [(TRANSFER, "smallest < SMALL *", "smallest < 0 *")],
    "every tensor is copied alone": [(TRANSFER, "end > self.limit or", "self._members or")],
    "a resident set is freed while it is read": [("loaders/resident_loader.py", "part.record_stream(", "(")],
    "two threads read from one engine": [("loaders/workers/epochs.py", "        self.end_reader()\n", "")],
    "times are read too early": [("loaders/timeline.py", "            later.event.synchronize()\n", "")],
    "no bound on the lead": [(COPY, "while self._used and", "while False and")],
}


def is_noticed(name: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for part in ("loaders", "tests"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for path, before, after in MUTANTS[name]:
            file = Path(folder, path)
            text = file.read_text()
            assert before in text, f"{name}: {path} has no {before!r}"
            file.write_text(text.replace(before, after, 1))
        scenarios = "tests/loaders/preload/on_simulated_gpu.py"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "-n", "0", "--timeout", "60", scenarios]
        return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode != 0


if __name__ == "__main__":
    for mutant in sys.argv[1:] or MUTANTS:
        print(f"{'noticed' if is_noticed(mutant) else 'NOT NOTICED'}: {mutant}", flush=True)
