"""Exports the network of a run, to be used without this repository.

    python extras/finished/export.py RUN                   # RUN/export/model.pt2, a program of torch.export
    python extras/finished/export.py RUN --format onnx     # RUN/export/model.onnx; pip install onnx onnxscript onnxruntime

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. The exported network is compared with
the original on samples of the run's test set (KEY=VALUE replaces a setting, as in data.root=DIR). README.md beside it
says how to call it, and example.npz has these samples' inputs with the outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from extras.finished.finished_run import FinishedRun, parser, refused_as, run_program
from loaders import move, tensors
from training.config import ConfigError
from training.files import write_whole

COMPARED = 16  # samples
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST_FILE = 2 * 10**9  # bytes: ONNX keeps the weights of larger networks in a second file

Inputs = tuple[Tensor, ...]
Predict = Callable[[Inputs], list[Tensor]]  # from the network's inputs to its outputs, on the CPU


def main(arguments: list[str] | None = None) -> Path:
    """Returns the path of the exported network."""
    options = parser(__doc__)
    options.add_argument("overrides", nargs="*", default=[], help="settings to replace, such as data.root=DIR")
    options.add_argument("--format", choices=("torch", "onnx"), default="torch", help="default: torch")
    options.add_argument("--out", type=Path, help="folder to write to; default: RUN/export")
    options.add_argument("--tolerance", type=float, default=1e-3, help="largest difference, as a share of the outputs")
    given = options.parse_intermixed_args(arguments)
    if given.format == "onnx" and (missing := [package for package in PACKAGES if find_spec(package) is None]):
        raise ConfigError(f"--format onnx needs {', '.join(missing)}: pip install {' '.join(missing)}")

    run = FinishedRun(given.run, [*given.overrides, "device=cpu"])
    out: Path = given.out or run.folder / "export"
    inputs, model = example(run), run.trainer.model.to(memory_format=torch.contiguous_format)
    out.mkdir(parents=True, exist_ok=True)
    with refused_as(f"{run} cannot be exported with --format {given.format}"):
        path = export_onnx(run, model, inputs, out) if given.format == "onnx" else export_torch(model, inputs, out)
        sentence, outputs = compare(model, load(path), inputs, given.tolerance, path)
    describe(run, path, inputs, outputs)
    print(f"{run}: {path}; {sentence}")
    return path


def example(run: FinishedRun) -> Inputs:
    """The network's inputs for some test samples, at least two: torch.export would fix a batch size of 1."""
    with run.loader(run.dataset("test")) as loader:
        (batch,) = islice(loader, 1)
    inputs, _ = run.trainer.inputs_and_labels(batch)
    if kinds := [type(one).__name__ for one in inputs if not isinstance(one, Tensor)]:
        raise ConfigError(f"{run} takes a {kinds[0]} as input: only networks that take tensors can be exported")
    parts = (one[:COMPARED].contiguous() for one in inputs)
    return tuple(torch.cat([one, one])[: max(2, len(one))] for one in parts)


def export_torch(model: nn.Module, inputs: Inputs, folder: Path) -> Path:
    """Writes a program of torch.export."""
    path, batch = folder / "model.pt2", torch.export.Dim("batch")
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))
    torch.export.save(program, path)
    return path


def export_onnx(run: FinishedRun, model: nn.Module, inputs: Inputs, folder: Path) -> Path:
    path, batch = folder / "model.onnx", torch.export.Dim("batch")
    size = sum(weight.nbytes for weight in model.state_dict().values())
    options: dict[str, Any] = {"input_names": list(run.task.inputs), "external_data": size > LARGEST_FILE}
    options |= {"dynamo": True, "dynamic_shapes": tuple({0: batch} for _ in inputs), "verbose": False}
    with torch.no_grad():
        torch.onnx.export(model, inputs, path, **options)
    return path


def load(path: Path) -> Predict:
    """The exported network, as a program without this repository would load it."""
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return lambda inputs: list(tensors(program(*inputs)))
    import onnxruntime  # optional

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def predict(inputs: Inputs) -> list[Tensor]:
        found = session.run(None, {name: one.numpy() for name, one in zip(names, inputs, strict=True)})
        return [torch.as_tensor(one) for one in found]

    return predict


def compare(
    model: nn.Module, exported: Predict, inputs: Inputs, tolerance: float, path: Path
) -> tuple[str, list[Tensor]]:
    """Compares on a batch, and on its first sample alone. Returns a sentence about it, and the network's outputs.

    Raises ConfigError, after it removed the file, if outputs differ by more than `tolerance` times the largest one.
    """
    with torch.no_grad():
        expected = list(tensors(model(*inputs)))
        differences = []
        for part in (inputs, tuple(one[:1] for one in inputs)):
            pairs = zip(exported(part), tensors(model(*part)), strict=True)
            differences += [(found.double() - one.double()).abs().max().item() for found, one in pairs]
    difference, largest = max(differences), max(one.double().abs().max().item() for one in expected)
    sentence = f"on {len(inputs[0])} test samples its outputs differ by up to {difference:.2g}, and are up to {largest:.2g}"
    if not difference <= tolerance * largest:  # also if one is NaN
        path.unlink()
        raise ConfigError(f"{path.name} computes different outputs: {sentence}; --tolerance sets the allowed share")
    return sentence, expected


def describe(run: FinishedRun, path: Path, inputs: Inputs, outputs: list[Tensor]) -> None:
    """Writes README.md and example.npz beside the network, which tell how to call it."""
    arrays = {name: one.numpy() for name, one in zip(run.task.inputs, inputs, strict=True)}
    found = {"outputs" if len(outputs) == 1 else f"outputs_{number}": one for number, one in enumerate(outputs)}
    np.savez(path.parent / "example.npz", **arrays, **{name: one.numpy() for name, one in found.items()})
    shapes = {name: f"{one.dtype} (batch, {', '.join(map(str, one.shape[1:]))})" for name, one in arrays.items()}
    lines = [f"# {run}", "", "Inputs, in order; the batch may have any size:", ""]
    lines += [f"- `{name}`: {shape}" for name, shape in shapes.items()]
    if (normalize := run.data.transform.then) is not None:
        lines += [
            "",
            f"For {', '.join(normalize.fields)}: take pixels of 0 to 255 as the dataset makes them "
            f"(`prepare` of {type(run.data.test).__name__}, in the repository that trained the network), divide by 255, "
            f"subtract the mean {list(normalize.mean)}, divide by the standard deviation {list(normalize.std)}, and put "
            "the channels first. Check yours against example.npz.",
        ]
    call = "import numpy\nexample = numpy.load('example.npz')\n"
    if path.suffix == ".pt2":
        call += f"import torch\nmodel = torch.export.load({path.name!r}).module()\n"
        call += f"outputs = model(*(torch.from_numpy(example[name]) for name in {list(arrays)}))"
    else:
        call += f"import onnxruntime\nmodel = onnxruntime.InferenceSession({path.name!r})\n"
        call += f"outputs = model.run(None, {{name: example[name] for name in {list(arrays)}}})"
    lines += ["", "```python", call, "```", "", "example.npz has inputs, and the outputs that the network gives for them."]
    if run.task.label_below:
        lines += ["Outputs are logits: softmax makes them probabilities. The classes, in order:", ""]
        lines += [f"    {name}" for name in run.data.test.classes]
    write_whole(path.parent / "README.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    run_program(main)
