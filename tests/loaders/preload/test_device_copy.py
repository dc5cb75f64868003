"""DeviceCopier on the CPU, and on a CUDA device the hazards of memory and streams.

`torch.cuda._sleep` keeps a stream busy for so many cycles that whatever does not wait for it comes first.
"""

import weakref

import pytest
import torch

from loaders.preload.device_copy import DeviceCopier
from loaders.randomness import Random

LONG = 500_000_000  # cycles: about a third of a second


def no_random() -> Random:
    return Random(0)


def cpu_copier(transform=None) -> DeviceCopier:
    return DeviceCopier("cpu", transform, depth=2)


def test_on_the_cpu_a_batch_needs_no_copy_and_nothing_to_wait_for():
    stage, batch = cpu_copier(), torch.arange(3)
    with stage.on_stream():
        prepared, ready = stage.prepare(batch, no_random())
    assert ready is None
    assert prepared.data_ptr() == batch.data_ptr()
    assert stage.hand_over(prepared, ready) is prepared


def test_the_transform_gets_the_moved_batch_and_the_random_numbers():
    seen = []

    def transform(batch, random):
        seen.append((batch.device.type, random))
        return batch

    random = no_random()
    DeviceCopier("meta", transform, depth=2).prepare(torch.zeros(2), random)
    assert seen == [("meta", random)]


def test_an_object_whose_to_takes_no_non_blocking_is_moved():
    class Plain:
        def __init__(self, device: str = "cpu") -> None:
            self.device = device

        def to(self, device) -> "Plain":
            return Plain(str(device))

    prepared, _ = DeviceCopier("meta", None, depth=0).prepare([Plain()], no_random())
    assert prepared[0].device == "meta"


def test_a_device_that_torch_does_not_know_is_refused_in_words():
    with pytest.raises(RuntimeError, match="device='gpu' is unknown to torch: use 'cpu', 'cuda'"):
        DeviceCopier("gpu", None, depth=2)


def test_a_device_that_is_not_there_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:9"):
        with pytest.raises(RuntimeError, match=f"device='{device}', but torch finds no CUDA device here: use device="):
            DeviceCopier(device, None, depth=2)


def test_a_batch_on_two_devices_is_refused():
    with pytest.raises(ValueError, match="a batch has tensors on cpu and meta: have the loader give all of them on"):
        cpu_copier().prepare({"image": torch.ones(2), "label": torch.ones(2, device="meta")}, no_random())


def test_a_batch_on_another_device_is_moved():
    batch, _ = DeviceCopier("meta", None, depth=2).prepare([torch.ones(2, device="meta")], no_random())
    assert batch[0].is_meta


@pytest.mark.cuda
def test_a_device_number_that_is_not_there_is_refused_in_words():
    with pytest.raises(RuntimeError, match=r"device='cuda:99', but torch finds \d+ CUDA devices? here"):
        DeviceCopier("cuda:99", None, depth=2)


@pytest.mark.cuda
def test_a_device_without_a_number_is_the_current_one():
    assert DeviceCopier("cuda", None, depth=2).device == torch.device("cuda", torch.cuda.current_device())


def cuda_stage(transform=None) -> DeviceCopier:
    """A stage whose stream and pinned memory have been used before: first use may synchronise the device."""
    stage = DeviceCopier("cuda", transform, depth=2)
    with stage.on_stream():
        stage.prepare(torch.zeros(1 << 20), no_random())
    torch.cuda.synchronize()
    stage.release_copied(wait=True)
    return stage


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True])
def test_preparing_never_waits_for_the_device(pinned):
    stage, batch = cuda_stage(), torch.ones(1 << 20)
    batch = batch.pin_memory() if pinned else batch
    with stage.on_stream():
        torch.cuda._sleep(LONG)
        prepared, ready = stage.prepare(batch, no_random())
    assert not ready.query(), "the copy was over when prepare() returned: it was synchronous"
    stage.hand_over(prepared, ready)
    assert bool((prepared == 1).all())


@pytest.mark.cuda
def test_the_consumers_stream_waits_for_the_batch():
    def slowly(batch, _):
        torch.cuda._sleep(LONG)
        return batch + 1

    stage = cuda_stage(slowly)
    with stage.on_stream():
        prepared, ready = stage.prepare(torch.ones(1 << 20), no_random())
    assert bool((stage.hand_over(prepared, ready) == 2).all())


@pytest.mark.cuda
def test_handing_over_never_waits_for_the_device():
    stage = cuda_stage()
    with stage.on_stream():
        torch.cuda._sleep(LONG)
        prepared, ready = stage.prepare(torch.ones(1 << 20), no_random())
    stage.hand_over(prepared, ready)
    assert not ready.query()


@pytest.mark.cuda
def test_the_memory_of_a_batch_is_not_reused_while_the_consumer_reads_it():
    stage = cuda_stage()
    verdicts = []
    for number in range(1, 9):
        with stage.on_stream():
            prepared, ready = stage.prepare(torch.full((1 << 20,), number), no_random())
        batch = stage.hand_over(prepared, ready)
        torch.cuda._sleep(LONG // 10)
        verdicts.append((batch == number).all())
        del batch, prepared  # the allocator may now give the memory to the next copy, on the other stream
    assert torch.stack(verdicts).tolist() == [True] * 8


def nested() -> dict:
    values = torch.arange(1.0, 7.0).reshape(2, 3)
    return {
        "strided": values,
        "transposed": values.T,
        "zero_dim": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "bool": values > 2,
        "bfloat16": values.bfloat16(),
        "complex": values.to(torch.complex64),
        "coo": values.to_sparse(),
        "csr": values.to_sparse_csr(),
        "csc": values.to_sparse_csc(),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)]),
        "others": ["text", b"bytes", None, 3],
    }


def dense(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.is_nested:
        return leaf.values()
    return leaf if leaf.layout == torch.strided else leaf.to_dense()


@pytest.mark.cuda
def test_tensors_of_every_kind_arrive_whole():
    stage, batch = cuda_stage(), nested()
    with stage.on_stream():
        prepared, ready = stage.prepare(batch, no_random())
    arrived = stage.hand_over(prepared, ready)
    assert arrived.pop("others") == batch.pop("others")
    assert torch.equal(arrived.pop("packed").data.cpu(), batch.pop("packed").data)
    for name, leaf in batch.items():
        assert arrived[name].is_cuda, name
        assert (arrived[name].dtype, arrived[name].layout) == (leaf.dtype, leaf.layout), name
        assert torch.equal(dense(arrived[name]).cpu(), dense(leaf)), name


class Watched:
    """A nest's leaf that is no tensor: tells when the host batch it is part of was let go."""


@pytest.mark.cuda
@pytest.mark.parametrize("depth", [0, 2])
def test_a_host_batch_is_held_until_its_copy_is_done(depth):
    stage = DeviceCopier("cuda", None, depth)
    batch = [torch.ones(1 << 20).pin_memory(), Watched()]
    alive = weakref.ref(batch[1])
    with stage.on_stream():
        torch.cuda._sleep(LONG)
        prepared, _ = stage.prepare(batch, no_random())
        copied = torch.cuda.Event()
        copied.record()
    prepared[1] = None
    del batch
    held = alive() is not None
    assert held or copied.query(), "the loader may rewrite memory that is being copied from"
    torch.cuda.synchronize()
    stage.release_copied(wait=True)
    assert alive() is None
