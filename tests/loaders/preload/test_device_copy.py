"""DeviceCopier on the CPU, and on a CUDA device the hazards of memory and streams.

`torch.cuda._sleep` keeps a stream busy for so many cycles that whatever does not wait for it comes first.
"""

import pytest
import torch

from loaders import Preloader
from loaders.preload.device_copy import DeviceCopier
from loaders.preload.transfer import strided_parts
from loaders.randomness import Random

LONG = 500_000_000  # cycles: about a third of a second


def no_random() -> Random:
    return Random(0)


def test_an_object_whose_to_takes_no_non_blocking_is_moved():
    class Plain:
        def __init__(self, device: str = "cpu") -> None:
            self.device = device

        def to(self, device) -> "Plain":
            return Plain(str(device))

    prepared, _ = DeviceCopier("meta", None, depth=0).prepare([Plain()], no_random())
    assert prepared[0].device == "meta"


def test_an_object_whose_to_returns_nothing_has_moved_itself():
    class Batch:
        def to(self, device, non_blocking=False) -> None:
            self.moved = True

    (batch,) = Preloader([Batch()], "cpu", 0)
    assert batch.moved


def test_a_device_that_torch_does_not_know_is_refused_in_words():
    with pytest.raises(RuntimeError, match="device='gpu' is unknown to torch: use 'cpu', 'cuda'"):
        DeviceCopier("gpu", None, depth=2)


def test_a_device_that_is_not_there_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:9"):
        with pytest.raises(RuntimeError, match=f"device='{device}', but torch finds no CUDA device here: use device="):
            DeviceCopier(device, None, depth=2)


@pytest.mark.parametrize(
    "convert", ["to_sparse_coo", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"]
)
@pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta")
def test_a_sparse_tensors_memory_is_that_of_its_strided_parts(convert):
    sparse = getattr(torch.eye(4), convert)(*(((2, 2),) if convert.endswith(("bsr", "bsc")) else ()))
    parts = list(strided_parts({"a": sparse, "b": torch.ones(1)}))
    assert len(parts) == (3 if convert == "to_sparse_coo" else 4)
    assert all(part.layout == torch.strided for part in parts)


def test_a_nested_tensors_memory_is_that_of_its_strided_parts():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    pointers = {part.data_ptr() for part in strided_parts([jagged])}
    assert {jagged.values().data_ptr(), jagged.offsets().data_ptr()} <= pointers


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
