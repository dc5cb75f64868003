"""Breaks the device path, one line at a time, and prints which test on the simulated GPU notices it.

`python tests/infrastructure/mutants.py [NAME ...]` changes a copy of the repository; a mutant takes half a minute.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPY = "loaders/preload/device_copy.py"
HOLD = "self._copying.append(HostBatch(batch))"
DONE = "self._note_done(done)"
MOVE = '            prepared, seconds = self._timed("copy", batch_number, move, batch, self._to_device)\n'
EARLY = "            early = self.stream and self.stream.record_event()\n"
RECORD = "tensor.record_stream(consumer)"
FINALLY = "        finally:  # after an error too"
ERROR = "        except ValueError:\n            self._copying.pop()\n            raise\n"
ERROR += "        else:  # after an error too"
BEGIN = "self.stream.wait_stream(self.accelerator.current_stream())"
PRELOADER = "loaders/preload/preloader.py"
CALL = "        self._copier.begin(seed, position.epoch, rank)\n"
BEFORE = "        with self._copier.accelerator.current():\n"

SLOTS = "loaders/workers/slots.py"
LOCKS = "loaders/page_locks.py"
SERIALIZE = "loaders/workers/serialize.py"
PROCESSES = "loaders/workers/process_pool.py"
THREADS = "loaders/workers/thread_pool.py"
UNLOCK = "        for slot in self._slots:\n            page_locks.unlock(slot._address)\n"
SCENARIOS = ("tests/loaders/preload/locks_on_simulated_gpu.py", "tests/loaders/preload/on_simulated_gpu.py")

# Each mutant replaces texts: (file, before, after).
MUTANTS = {
    "no host batch is held": [(COPY, HOLD, "pass")],
    "only the newest is held": [(COPY, HOLD, f"self._copying.clear(), {HOLD}")],
    "held with a side stream only": [(COPY, "        if self.accelerator.has_streams:", "        if self.stream:")],
    "its event comes before the copy": [
        (COPY, MOVE, EARLY + MOVE),
        (COPY, DONE, "self._note_done(early or done)"),
    ],
    "released before the transform": [(COPY, MOVE, MOVE + EARLY), (COPY, DONE, "self._note_done(early or done)")],
    "an error drops the hold": [(COPY, FINALLY, ERROR)],
    "no wait at the end": [(COPY, "            (self._copying[0].event or self.accelerator).synchronize()\n", "")],
    "the thread is on the default stream": [
        ("loaders/preload/engine.py", "accelerator.using(self._copier.stream)", "accelerator.using(None)")
    ],
    "the consumer's stream does not wait": [(COPY, "consumer.wait_event(ready.event)", "pass")],
    "ready before the transform": [(COPY, MOVE, MOVE + EARLY), (COPY, "Ready(done)", "Ready(early)")],
    "no record_stream": [(COPY, RECORD, "pass")],
    "record_stream on the side stream": [(COPY, RECORD, RECORD.replace("consumer", "self.stream"))],
    "what an object holds is not recorded": [("loaders/nested.py", "objects.append(item)", "pass")],
    "no begin": [(COPY, BEGIN, "pass")],
    "begin before iter()": [(PRELOADER, CALL, ""), (PRELOADER, BEFORE, CALL + BEFORE)],
    "no bound on the lead": [(COPY, "            event.synchronize()\n", "            pass\n")],
    "from memory that is not pinned": [(COPY, "leaf = leaf.pin_memory()", "leaf = leaf.clone()")],
    "the current device's events": [
        ("loaders/accelerator.py", "event.record(stream or self.current_stream())", "event.record(stream)")
    ],
    "a resident set is freed while it is read": [("loaders/resident_loader.py", "part.record_stream(", "(")],
    "a group is read before it is made": [("loaders/resident_loader.py", "stream.wait_event(self._made)", "pass")],
    "a group is freed while it is read": [("loaders/resident_loader.py", "tensor.record_stream(stream)", "pass")],
    "times are read too early": [("loaders/timeline.py", "            later.event.synchronize()\n", "")],
    "unlocked before the copy is done": [(SLOTS, "        self._taken += 1\n", UNLOCK + "        self._taken += 1\n")],
    "a larger batch is not locked": [(LOCKS, " and lock.size >= size", "")],
    "pages are given back while they are locked": [(SLOTS, "page_locks.unlock(self._address)", "pass")],
    "slots are unmapped while they are locked": [(SLOTS, "page_locks.unlock(address, size)", "pass")],
    "a forked child unlocks": [(LOCKS, "lock.owner == os.getpid()", "lock.owner")],
    "locked slots without a preloader": [(LOCKS, "        unlock(address)\n", "        return\n")],
    "pinned memory of threads without a preloader": [(THREADS, "copy_out(reading.batch)", "pass")],
    "threads' memory is not pinned": [(THREADS, "memory.pin_for(self.locks_for)", "pass")],
    "recycled before the copy is done": [("loaders/workers/batch_buffer.py", " if tensors_on() is None", "")],
    "what is passed on stays locked": [(COPY, "copy_out(prepared)", "pass")],
    "locked for another device": [(LOCKS, "lock.accelerator.device == accelerator.device and ", "")],
    "slots are not locked": [(PROCESSES, "lease.slot.lock_for(self.locks_for)", "lease.slot.lock_for(None)")],
    "small tensors are not copied from their slot": [(SERIALIZE, "= is_leaf and self._is_locked", "= False")],
    "more is locked than a share": [(LOCKS, " <= limit()", " >= 0")],
    "a failure is repeated": [(LOCKS, "        _has_failed = True\n", "")],
}


def noticed_by(name):
    """Returns the first test that fails, or an empty text."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("loaders", "tests"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for path, before, after in MUTANTS[name]:
            file = Path(folder, path)
            text = file.read_text()
            assert before in text, f"{name}: {path} has no {before!r}"
            file.write_text(text.replace(before, after, 1))
        options = ["-q", "-x", "--noconftest", "-n", "0", "--timeout", "60"]
        command = [sys.executable, "-m", "pytest", *options, *SCENARIOS]
        output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
        failure = re.search(r"^(?:FAILED|ERROR) \S*?(\w+(?:\[.*\])?)(?: - .*)?$", output, re.MULTILINE)
        return failure[1] if failure else ""


if __name__ == "__main__":
    for mutant in sys.argv[1:] or MUTANTS:
        test = noticed_by(mutant)
        print(f"{mutant}: {test or 'NOT NOTICED'}", flush=True)
