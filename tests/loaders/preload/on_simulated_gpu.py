"""The preloader on a simulated GPU: bytes are those of a CPU run, whatever the delays. test_simulated_gpu runs it."""

import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[level]) for level in (3, 0)]

from simulated_loads import BATCH, DEVICE, LOADERS, ROWS, WIDTH, Ring, Rows, consumed, doubled, expected, workers  # noqa: E402

from loaders import Accelerator, Preloader, ResidentLoader, StepTimer, Timeline, chosen_device  # noqa: E402
from tests.infrastructure import simulated_gpu as sim  # noqa: E402
from tests.infrastructure import simulated_streams as streams  # noqa: E402


@pytest.fixture(autouse=True)
def simulated():
    """Delays are drawn anew, and nothing undefined has happened."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"delays drawn from seed {seed}")
    random.seed(seed)
    sim.copy_seconds = 0.003
    sim.kernel_seconds = 0.0015
    yield
    streams.synchronize()
    assert streams.errors == []


# Each kind at one depth, and each depth with some kinds; the other pairs are slow.
PAIRS = [
    pytest.param(kind, depth, marks=[] if (number - place) % 3 == 0 else [pytest.mark.slow])
    for number, kind in enumerate(LOADERS)
    for place, depth in enumerate((4, 0, 1))
]


@pytest.mark.parametrize(("kind", "depth"), PAIRS)
def test_bytes_are_those_of_the_cpu(kind, depth):
    with Preloader(LOADERS[kind](), DEVICE, depth, doubled) as loader:
        assert consumed(loader, epochs=2) == expected(kind, epochs=2)


@pytest.mark.parametrize(
    "kind", ["persistent", "ring", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("seeded", "threads"))]
)
def test_batches_that_are_kept_and_epochs_that_are_left_change_nothing(kind):
    for how in ({"kept": 9}, {"leave_at": 3, "epochs": 3}):
        with Preloader(LOADERS[kind](), DEVICE, 2, doubled) as loader:
            assert consumed(loader, **how) == expected(kind, **how)


def test_the_second_device_is_served_while_the_first_is_current():
    with Preloader(workers(), "sim:1", 2, doubled) as loader:
        assert next(loader)["x"].device == torch.device("sim:1")
        loader.set_epoch(0)
        assert consumed(loader) == expected("seeded")


def test_a_device_without_a_number_is_the_current_one_and_others_have_to_exist():
    with streams.device(1):
        assert Preloader([], "sim").device == torch.device("sim:1")
    with pytest.raises(RuntimeError, match="device='sim:2'"):
        chosen_device("sim:2")
    assert Accelerator("sim:1").has_streams


def test_a_consumer_on_a_stream_of_its_own_reads_the_right_bytes():
    with Preloader(workers(), DEVICE, 2, doubled) as loader, streams.stream(streams.Stream(DEVICE)):
        assert consumed(loader) == expected("seeded")


@pytest.mark.parametrize("depth", [0, 2])
def test_work_that_the_loader_queues_in_iter_is_waited_for(depth):
    go = threading.Event()
    prepared = threading.Event()
    before = set(streams.all_streams)

    class OnDevice(Rows):
        def arrays(self):
            x = torch.zeros(ROWS, WIDTH, dtype=torch.int32, device=DEVICE)
            streams.current_stream().queue.add(lambda: go.wait(60))
            x += 20  # late, on the stream that is current in iter()
            return {"x": x, "label": np.arange(ROWS)}

    def transform(batch, random):
        batch = doubled(batch, random)
        prepared.set()
        return batch

    with Preloader(ResidentLoader(OnDevice(), BATCH, device=DEVICE), DEVICE, depth, transform) as loader:
        iterator = iter(loader)
        for stream in set(streams.all_streams) - before:
            assert prepared.wait(60)
            stream.queue.settle()  # now a stream that does not wait has read too early
        go.set()
        assert [low for low, _, _ in consumed(iterator)] == [[40] * BATCH] * (ROWS // BATCH)


def test_a_resident_set_is_freed_only_when_nothing_reads_it():
    sim.kernel_seconds = 0.01
    loader = ResidentLoader(Rows(), BATCH, seed=3, device=DEVICE)
    iterator = iter(loader)
    streams.synchronize()
    with streams.stream(streams.Stream(DEVICE)):
        busy = torch.zeros(1, device=DEVICE)
        for _ in range(10):
            busy += 1
        batch = next(iterator)
        loader.close()
        assert consumed([doubled(batch, None)]) == expected("resident")[:1]


def test_batches_of_a_group_may_be_taken_on_other_streams_than_the_one_that_made_it():
    go = threading.Event()

    def on_streams(loader):
        iterator = iter(loader)
        streams.synchronize()
        streams.current_stream().queue.add(lambda: go.wait(60))
        next(iterator)  # the group is made late
        for _ in range(1, len(loader)):
            stream = streams.Stream(DEVICE)
            with streams.stream(stream):
                yield doubled(next(iterator), None)
                stream.queue.settle()  # now a stream that does not wait has read too early
        go.set()
        streams.synchronize()

    sim.kernel_seconds = 0.01
    with ResidentLoader(Rows(), BATCH, seed=3, device=DEVICE) as loader:
        assert consumed(on_streams(loader)) == expected("resident")[1:]


class Hidden:
    """Has tensors as attributes, which the preloader does not move."""

    def __init__(self, fields):
        vars(self).update(fields)


class Moving(Hidden):
    """Moves itself."""

    def to(self, device):
        return Moving({name: field.to(device, non_blocking=True) for name, field in vars(self).items()})


OBJECTS = {  # what the loader yields, the transform of its attributes, and the longest delay of copies and of kernels
    "moves itself": (Moving, doubled, 0.03, 0.001),
    "the transform moves": (Hidden, lambda fields, key: doubled(vars(Moving(fields).to(DEVICE)), key), 0.03, 0.001),
    "comes from the transform": (dict, doubled, 0, 0.01),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_tensors_inside_an_object_are_as_safe_as_others(kind):
    wrap, change, sim.copy_seconds, sim.kernel_seconds = OBJECTS[kind]

    def transform(batch, random):
        return Hidden(change(batch if wrap is dict else vars(batch), random))

    def opened(loader):
        for batch in loader:
            fields = dict(vars(batch))
            del batch
            yield fields
            del fields

    with Preloader(Ring(wrap), DEVICE, 4, transform) as loader:
        assert consumed(opened(loader)) == expected("ring")


@pytest.mark.parametrize("kind", ["persistent", "resident", "torch"])
def test_no_copy_to_the_device_blocks(kind):
    with Preloader(LOADERS[kind](), DEVICE, 2, doubled) as loader:
        next(loader)  # a resident set is copied to the device as it is
        before = sim.blocking
        list(loader)
        assert sim.blocking == before


def test_memory_is_bounded_however_far_the_host_is_ahead(depth=2):
    sim.copy_seconds = 0.0
    sim.kernel_seconds = 0.006
    with Preloader(workers(), DEVICE, depth, doubled) as loader:
        before = sim.reserved
        results = []
        for batch in (batch for _ in range(2) for batch in loader):
            results.append(sum(batch["x"].sum() for _ in range(3)))  # longer than a busy host needs for a batch
        copied = BATCH * (WIDTH * 4 + 8)
        small = 512 * (6 * len(results) + 100)  # the sums, and labels
        assert sim.reserved - before <= (depth + 4) * 2 * copied + small
    assert len(results) == 2 * ROWS // BATCH


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_whose_transform_fails_is_held_until_what_it_queued_is_done(depth):
    kept = []

    def fails(batch, random):
        kept.append(batch["x"])
        raise ValueError

    sim.copy_seconds = 0.02
    with Preloader(Ring(), DEVICE, depth, fails) as loader:
        iterator = iter(loader)
        for _ in range(ROWS // BATCH):
            with pytest.raises(ValueError):
                next(iterator)
        streams.synchronize()
        assert [x.cpu()[:, 0].tolist() for x in kept] == torch.arange(ROWS).view(-1, BATCH).tolist()


@pytest.mark.parametrize("kind", ["seeded", "inline", "threads"])
def test_without_a_preloader_batches_are_in_torchs_pinned_memory(kind):
    assert {batch["x"].is_pinned() for batch in LOADERS[kind]()} == {True}


def test_tensors_of_every_kind_arrive_whole():
    block = torch.arange(4096, dtype=torch.int32)
    batch = {
        "shared": [block[:1000], block[1001:2001].view(10, 100).T, block[3000:].view(torch.uint8)],
        "overlapping": [block[:100], block[50:150], block[:400:2], block[5].expand(3)],
        "dtypes": [torch.ones(9).to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.float64)],
        "odd": [torch.tensor(5), torch.zeros(0, 3), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)],
        "others": ["text", None, 3],
    }
    (arrived,) = Preloader([batch], DEVICE, 2)
    assert arrived.pop("others") == batch.pop("others")
    for kind, sent in batch.items():
        for here, there in zip(sent, arrived[kind], strict=True):
            assert (there.device, there.dtype, there.stride()) == (DEVICE, here.dtype, here.to("meta").stride()), kind
            assert torch.equal(there.cpu(), here), kind
    arrived["overlapping"][1].fill_(-1)
    assert torch.equal(arrived["overlapping"][0].cpu(), block[:100]), "they overlap on the host alone"


def test_steps_and_spans_are_timed_on_their_own_device():
    timeline = Timeline("sim:1")
    with Preloader(workers(), "sim:1", 2, doubled) as loader:
        loader.timeline = timeline
        timer = StepTimer(torch.device("sim:1"), 2, timeline, 8)
        for batch in timer.batches(loader):
            batch["x"].sum()
            timeline.spans()  # may be read while copies are under way
    window = timer.run()
    spans = timeline.spans()
    assert window.steps == ROWS // BATCH - 2
    assert 0 < window.wait_seconds < window.seconds
    assert {Timeline.COPY_STREAM, Timeline.GPU, "preloader", "training loop"} <= {span.lane for span in spans}
    arrived = {span.batch: span.end for span in spans if span.lane == Timeline.COPY_STREAM}
    steps = {span.batch: span.start for span in spans if (span.lane, span.activity) == (Timeline.GPU, "compute")}
    timed = steps.keys() & arrived.keys()
    assert timed and all(arrived[batch] <= steps[batch] for batch in timed)


def test_a_stream_is_made_for_the_preloader_and_not_for_each_epoch():
    with Preloader(workers(persistent_workers=True), DEVICE, 2, doubled) as loader:
        list(loader)
        before = len(streams.all_streams)
        for _ in range(3):
            list(loader)
        assert len(streams.all_streams) == before
