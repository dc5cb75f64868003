"""Exports the network of a run, to be used without this repository.

    python extras/finished/export.py RUN   # RUN/export/model.pt2, a program of torch.export

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. The exported network is compared with
the original on samples of the run's test set (KEY=VALUE replaces a setting, as in data.root=DIR). README.md beside it
says how to call it, and example.npz has these samples' inputs with the outputs. extras/finished/README.md says how to
make an ONNX file of it.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from extras.finished.finished_run import FinishedRun, parser
from loaders import tensors
from training.config import ConfigError
from training.files import write_whole
from training.script import run_script

COMPARED = 16  # samples
TOLERANCE = 1e-3  # largest difference of the outputs, as a share of the largest output
CALL = """```python
import numpy
import torch
example = numpy.load("example.npz")
model = torch.export.load("model.pt2").module()
outputs = model(*(torch.from_numpy(example[name]) for name in {names}))
```"""

Inputs = tuple[Tensor, ...]


def main(typed: list[str] | None = None) -> Path:
    """Returns the path of the exported network."""
    options = parser(__doc__)
    options.add_argument("overrides", nargs="*", default=[], help="settings to replace, such as data.root=DIR")
    options.add_argument("--out", type=Path, help="folder to write to; default: RUN/export")
    arguments = options.parse_intermixed_args(typed)

    run = FinishedRun(arguments.run, [*arguments.overrides, "device=cpu"])
    out: Path = arguments.out or run.folder / "export"
    inputs = example(run)
    model = run.trainer.model.to(memory_format=torch.contiguous_format)
    out.mkdir(parents=True, exist_ok=True)
    path = write(model, inputs, out)
    sentence, outputs = compare(model, inputs, path)
    describe(run, path, inputs, outputs)
    print(f"{run}: {path}; {sentence}")
    return path


def example(run: FinishedRun) -> Inputs:
    """The network's inputs for some test samples, at least two: torch.export would fix a batch size of 1."""
    with run.loader(run.dataset("test")) as loader:
        (batch,) = islice(loader, 1)
    inputs, _ = run.trainer.inputs_and_labels(batch)
    parts = [tensor[:COMPARED].contiguous() for tensor in inputs]
    return tuple(torch.cat([part, part])[: max(2, len(part))] for part in parts)


def write(model: nn.Module, inputs: Inputs, folder: Path) -> Path:
    path = folder / "model.pt2"
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    try:
        with torch.no_grad():
            torch.export.save(torch.export.export(model, inputs, dynamic_shapes=shapes), path)
    except Exception as error:  # torch raises many kinds, with pages of advice
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"torch.export cannot export {type(model).__name__} ({reason}): if `forward` has an `if` on the values of "
            "a tensor, use torch.where or torch.cond"
        ) from error
    return path


def compare(model: nn.Module, inputs: Inputs, path: Path) -> tuple[str, list[Tensor]]:
    """Compares on a batch, and on its first sample alone. Returns a sentence about it, and the network's outputs.

    If outputs differ by more than TOLERANCE, removes the file and raises ConfigError.
    """
    differences = []
    exported = torch.export.load(path).module()
    with torch.no_grad():
        expected = list(tensors(model(*inputs)))
        for part in (inputs, tuple(tensor[:1] for tensor in inputs)):
            for ours, theirs in zip(tensors(exported(*part)), tensors(model(*part)), strict=True):
                differences.append(largest_of(ours.double() - theirs.double()))
    difference = max(differences)
    largest = max(map(largest_of, expected))
    sentence = f"of {len(inputs[0])} samples its outputs differ by up to {difference:.2g}, and are up to {largest:.2g}"
    if not difference <= TOLERANCE * largest:  # also if one is NaN
        path.unlink()
        raise ConfigError(f"{path.name} computes different outputs: {sentence}")
    return sentence, expected


def largest_of(values: Tensor) -> float:
    return values.double().abs().max().item()


def describe(run: FinishedRun, path: Path, inputs: Inputs, outputs: list[Tensor]) -> None:
    """Writes README.md and example.npz beside the network, which show how to call it."""
    names = list(run.task.inputs)
    arrays = [tensor.numpy() for tensor in inputs]
    example: dict[str, Any] = dict(zip(names, arrays, strict=True))
    for number, output in enumerate(outputs):
        name = "outputs" if len(outputs) == 1 else f"outputs_{number}"
        example[name] = output.numpy()
    np.savez(path.parent / "example.npz", **example)
    lines = [f"# {run}", "", "Inputs, in order; the batch may have any size:", ""]
    for name, array in zip(names, arrays, strict=True):
        lines.append(f"- `{name}`: {array.dtype} (batch, {', '.join(map(str, array.shape[1:]))})")
    normalize = run.data.normalize
    if normalize is not None:
        lines.append(
            f"\nOf {', '.join(normalize.fields)}: take the pixels (0 to 255) that the dataset makes "
            f"({type(run.data.test).__name__}, in the repository that trained the network), divide by 255, subtract "
            f"the mean {list(normalize.mean)}, divide by the standard deviation {list(normalize.std)}, and put the "
            "channels first."
        )
    lines += ["", CALL.format(names=names), ""]
    lines += ["example.npz has prepared inputs, and the network's outputs for them: compare yours."]
    if run.task.label_below and run.data.classes:
        lines += ["Outputs are logits: softmax makes them probabilities. The classes, in order:", ""]
        lines += [f"    {name}" for name in run.data.classes]
    write_whole(path.parent / "README.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    run_script(main)
