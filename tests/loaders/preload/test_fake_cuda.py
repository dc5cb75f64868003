"""The copy to a GPU where there is none: stand-ins for torch's streams and events note what is asked of them."""

import copy
import weakref
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch

from loaders import Preloader
from loaders.preload import device_copy
from loaders.preload.accelerator import checked_device
from loaders.preload.device_copy import DeviceCopier
from loaders.randomness import Random


class Event:
    """Completed when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.waited = 0

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.waited += 1


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recorded: list[Event] = []
        self.waits_for: list = []

    def record_event(self) -> Event:
        self.recorded.append(Event())
        return self.recorded[-1]

    def wait_event(self, event: Event) -> None:
        self.waits_for.append(event)

    wait_stream = wait_event


class HostTensor(torch.Tensor):
    """Is "moved" without a device, and notes how, and which streams read it."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:1" if hasattr(self, "moved") else "cpu")

    def to(self, device, non_blocking: bool = False):
        self.moved = str(device), non_blocking
        return self

    def is_pinned(self) -> bool:
        return hasattr(self, "pinned")

    def pin_memory(self):
        assert not self.is_pinned(), "it is page-locked already"
        self.pinned = True
        return self

    def record_stream(self, stream) -> None:
        self.stream = stream


def tensor(*values: int) -> HostTensor:
    return torch.tensor(values).as_subclass(HostTensor)


def moved(*values: int) -> HostTensor:
    return tensor(*values).to("cuda:1")


@pytest.fixture
def gpu(monkeypatch):
    """Two GPUs, of which the second is the current one, with a stream; `side` has the streams that are made.

    `entered` has what was made current, from outside in.
    """
    gpu = SimpleNamespace(current=Stream(torch.device("cuda:1")), side=[], entered=[])

    def make_stream(device: torch.device) -> Stream:
        gpu.side.append(Stream(device))
        return gpu.side[-1]

    @contextmanager
    def entering(thing):
        gpu.entered.append(thing)
        yield
        gpu.entered.append("left")

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "current_stream": lambda device: gpu.current,
        "Stream": make_stream,
        "stream": entering,
        "device": entering,
        "synchronize": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return gpu


def copier(depth: int = 2, transform=None) -> DeviceCopier:
    return DeviceCopier("cuda", transform, depth)


def test_a_gpu_without_a_number_is_the_current_one_and_the_last_number_exists(gpu):
    assert checked_device("cuda") == torch.device("cuda:1")
    assert checked_device("cuda:1") == torch.device("cuda:1")
    assert checked_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(
        RuntimeError, match="device='cuda:2', but torch finds 2 CUDA devices here: use a number below 2"
    ):
        checked_device("cuda:2")


def test_the_side_stream_waits_for_what_the_calling_thread_has_queued(gpu):
    stage = copier()
    stage.begin()
    assert [stream.waits_for for stream in gpu.side] == [[gpu.current]]
    copier(depth=0).begin()
    assert not gpu.current.waits_for


def test_work_is_done_on_the_side_stream_of_the_device(gpu):
    stage = copier()
    with stage.on_stream():
        pass
    assert gpu.entered == [torch.device("cuda:1"), gpu.side[0], "left", "left"]
    gpu.entered.clear()
    with copier(depth=0).on_stream():
        pass
    assert gpu.entered == [torch.device("cuda:1"), "left"]


def test_a_batch_is_page_locked_once_and_copied_without_waiting(gpu):
    stage, batch = copier(), tensor(1, 2)
    stage.prepare(batch, Random(0))
    stage.prepare(batch, Random(0))
    assert batch.moved == ("cuda:1", True)
    assert batch.pinned


def test_an_object_that_moves_itself_is_asked_not_to_wait(gpu):
    class Moving:
        def to(self, *given, **how):
            return given, how

    prepared, _ = copier().prepare([Moving()], Random(0))
    assert prepared == [((torch.device("cuda:1"),), {"non_blocking": True})]


def test_without_a_side_stream_nothing_is_page_locked(gpu):
    batch = tensor(1, 2)
    copier(depth=0).prepare(batch, Random(0))
    assert batch.moved == ("cuda:1", True)
    assert not batch.is_pinned()


def test_what_lies_on_a_device_or_is_sparse_is_not_page_locked(gpu, monkeypatch):
    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda leaf, *_, **how: moved.append(how))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda leaf: pytest.fail("it was page-locked"))
    copier().prepare(torch.ones(2, device="meta"), Random(0))
    copier().prepare(torch.ones(2, 2).to_sparse(), Random(0))
    assert moved == [{"non_blocking": True}] * 2


@pytest.mark.parametrize("depth", [0, 2])
def test_host_batches_are_let_go_in_order_as_soon_as_their_copies_are_done(gpu, depth):
    stage = copier(depth)
    held = []
    for number in range(2):
        batch = tensor(number)
        held.append(weakref.ref(batch))
        stage.prepare(batch, Random(0))
        del batch
    first, second = gpu.side[0].recorded[::2] if depth else gpu.current.recorded
    first.is_done = True
    stage.prepare("no tensor", Random(0))
    assert [batch() is not None for batch in held] == [False, True]
    stage.release_copied(wait=True)
    assert [batch() is not None for batch in held] == [False, False]
    assert second.waited == 1


def test_a_batch_whose_copy_fails_is_held_like_any_other(gpu):
    class Broken:
        def to(self, *_, **__):
            raise MemoryError

    stage, first = copier(), tensor(1)
    held = weakref.ref(first)
    with suppress(MemoryError):
        stage.prepare([first, Broken()], Random(0))
    del first
    assert held() is not None, "its copy may be under way"
    stage.release_copied(wait=True)
    assert held() is None


def test_the_event_of_a_batch_comes_after_its_transform(gpu):
    stage = copier(transform=lambda batch, _: gpu.side[0].recorded.append("transform") or batch)
    _, ready = stage.prepare(tensor(1), Random(0))
    transform, held, transformed = gpu.side[0].recorded  # the host batch is held until its transform is done, too
    assert (transform, transformed) == ("transform", ready)
    assert held is not ready


def test_the_consumers_stream_waits_for_the_batch_and_keeps_its_memory(gpu):
    stage, batch = copier(), {"image": moved(1), "label": [moved(2)]}
    ready = Event()
    assert stage.hand_over(batch, ready) is batch
    assert gpu.current.waits_for == [ready]
    assert batch["image"].stream is batch["label"][0].stream is gpu.current


def test_without_an_event_there_is_nothing_to_wait_for(gpu):
    batch = tensor(1)
    assert copier(depth=0).hand_over(batch, None) is batch
    assert not gpu.current.waits_for
    assert not hasattr(batch, "stream")


@pytest.mark.parametrize(
    "convert", ["to_sparse_coo", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"]
)
@pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta")
def test_the_memory_of_a_sparse_tensor_is_that_of_its_parts(gpu, monkeypatch, convert):
    size = ((2, 2),) if convert.endswith(("bsr", "bsc")) else ()
    sparse = getattr(torch.eye(4), convert)(*size)
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda:1")))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, stream: recorded.append(part))
    copier().hand_over(sparse, Event())
    assert len(recorded) == (2 if convert == "to_sparse_coo" else 3)
    assert all(part.layout == torch.strided for part in recorded)


def test_a_tensor_made_of_others_is_recorded_by_its_parts(gpu):
    inner = moved(1)

    class Outer(torch.Tensor):
        def __tensor_flatten__(self):
            return ["inner"], None

    outer = torch.ones(1).as_subclass(Outer)
    outer.inner = inner
    device_copy._record_stream(outer, gpu.current, torch.device("cuda:1"))
    assert inner.stream is gpu.current


def test_a_tensor_on_the_host_is_not_recorded(gpu, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: pytest.fail("it belongs to no stream"))
    device_copy._record_stream(torch.ones(1), gpu.current, torch.device("cuda:1"))


def test_the_hosts_seconds_add_up(gpu, monkeypatch):
    clock = iter([1.0, 3.0, 4.0, 10.0, 14.0, 22.0])
    monkeypatch.setattr(device_copy.time, "perf_counter", lambda: next(clock))
    stage = copier()
    assert (stage.copy_seconds, stage.transform_seconds) == (0, 0)
    stage.prepare(tensor(1), Random(0))
    stage.prepare(tensor(2), Random(0))
    assert (stage.copy_seconds, stage.transform_seconds) == (2 + 4, 1 + 8)


class OnHost:
    """A loader of one batch, which may hold its batches until they are copied."""

    holds_batches_until_copied = False

    def __iter__(self):
        self.held = self.holds_batches_until_copied
        return iter([tensor(1)])


def test_a_preloader_has_a_side_stream_if_it_has_a_thread_and_so_has_its_copy(gpu):
    for depth, streams in ((0, 0), (1, 2), (2, 2)):
        copy.copy(Preloader(OnHost(), "cuda", depth))
        assert len(gpu.side) == streams
        gpu.side.clear()


def test_the_side_stream_waits_for_the_consumers_when_an_epoch_begins(gpu):
    with Preloader(OnHost(), "cuda", 1) as loader:
        assert len(list(loader)) == 1
        assert gpu.side[0].waits_for == [gpu.current]


def test_a_preloaders_loader_holds_its_batches_for_a_gpu_and_for_nothing_else(gpu):
    loaders = [OnHost(), OnHost(), [tensor(1)]]
    for loader, device in zip(loaders, ("cuda", "cpu", "cuda"), strict=True):
        list(Preloader(loader, device, 0))
    assert [getattr(loader, "held", None) for loader in loaders] == [True, False, None]
    assert not any(getattr(loader, "holds_batches_until_copied", False) for loader in loaders)


def test_at_the_end_of_an_epoch_all_copies_are_done(gpu):
    assert len(list(Preloader(OnHost(), "cuda", 0))) == 1
    assert [event.waited for event in gpu.current.recorded] == [1]
