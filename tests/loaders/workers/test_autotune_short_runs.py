"""num_workers="auto" over the first 30 seconds of a run on a simulated machine, against fixed numbers of workers."""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from loaders.workers.autotune import FixedNumber, Tuner

AHEAD = 4  # batches per worker


@dataclass
class Machine:
    """A consumer and workers that share `cores`. The clock is scripted; a busy core is shared evenly.

    A batch takes `wait` seconds without a core, and `work` seconds of one; the latter varies by up to the factor
    `uneven`. A step takes `device` seconds without a core, and `host` seconds of one. With `clash` the workers share a
    lock: n of them compute n / (1 + clash * (n - 1)) times as fast as one.
    """

    cores: int
    work: float
    wait: float = 0.0
    device: float = 0.001
    host: float = 0.0
    uneven: float = 1.0
    clash: float = 0.0

    def delivered(self, tuner: Tuner | FixedNumber, seconds: float = 30.0) -> int:
        """How many batches the consumer gets in so many seconds after the start."""
        draw, now, batches = random.Random(0), 0.0, 0
        queues: dict[int, deque[int]] = {}  # worker -> numbers of its batches; the first is being read
        left: dict[int | str, list[float]] = {}  # of each running job: seconds to wait, seconds to compute
        done: set[int] = set()
        submitted, asked, computed, busy = 0, 0.0, 0.0, 0.0
        while now < seconds:
            while submitted - batches < AHEAD * tuner.workers:
                worker = min(range(tuner.workers), key=lambda each: (len(queues.setdefault(each, deque())), each))
                queues[worker].append(submitted)
                submitted += 1
            for worker, queue in queues.items():
                if queue and worker not in left:
                    left[worker] = [self.wait, self.work * self.uneven ** draw.uniform(-1, 1)]
            if "step" not in left and batches in done:
                done.discard(batches)
                ready, in_flight = len(done), submitted - batches - 1
                is_first, batches, load = not batches, batches + 1, computed / busy if busy else 1.0
                tuner.delivered(now, now - asked, ready, in_flight, is_first, load)
                left["step"] = [self.device, self.host]
                continue
            computing = [job for job, (wait, _) in left.items() if wait <= 0]
            rivals = sum(job != "step" for job in computing) - 1
            share = min(1.0, self.cores / max(1, len(computing)))
            speed = min(share, 1 / (1 + self.clash * max(0, rivals)))
            passed = min(wait if wait > 0 else work / speed for wait, work in left.values())
            now += passed
            for job, (wait, work) in list(left.items()):
                is_computing = wait <= 0
                left[job] = [wait, work - speed * passed] if is_computing else [wait - passed, work]
                if job != "step":
                    computed += passed * speed * is_computing
                    busy += passed * (share if is_computing else 1.0)
                if max(left[job]) <= 1e-9:
                    del left[job]
                    if job == "step":
                        asked = now
                    else:
                        tuner.new_workers.discard(job)
                        done.add(queues[job].popleft())
        return batches


MACHINES = {
    "even samples": Machine(cores=2, work=0.07),
    "even samples, 16 cores": Machine(cores=16, work=0.2),
    "uneven samples": Machine(cores=2, work=0.07, uneven=3.0),
    "uneven samples, long batches": Machine(cores=4, work=0.3, uneven=3.0),
    "samples that wait": Machine(cores=2, work=0.01, wait=0.2),
    "fast samples": Machine(cores=16, work=0.01, device=0.03),
    "a step in between": Machine(cores=8, work=0.1, device=0.03),
    "a step that needs the cores": Machine(cores=2, work=0.02, host=0.04),
    "workers that wait for a lock": Machine(cores=8, work=0.02, clash=1.1),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_first_30_seconds_are_nearly_as_fast_as_with_the_best_fixed_number(machine):
    best = max(machine.delivered(FixedNumber(workers)) for workers in (1, 2, 4, 8, 16, 32))
    assert machine.delivered(Tuner(machine.cores)) >= 0.95 * best
