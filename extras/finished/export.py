"""Exports the network of a run, to be used without this repository.

    python extras/finished/export.py RUN                        # RUN/export/model.pt2, a program of torch.export
    python extras/finished/export.py RUN --format onnx          # model.onnx: its inputs have the names of the fields
    python extras/finished/export.py RUN --format safetensors   # model.safetensors, the weights alone

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. Beside the export, README.md says how
to call it, preprocessing.json how to make its input of an image, in numbers, and example.npz has inputs with their
outputs. The exported network is compared with the original on them. The run's data are not needed if its checkpoint
says by values how images are prepared; else the inputs are samples of the test set (KEY=VALUE replaces a setting).
"""

import importlib
import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.errors import explained
from extras.finished.finished_run import FinishedRun, parser
from extras.finished.new_images import NewImages, described
from loaders import tensors
from training.config import ConfigError
from training.files import write_whole
from training.script import run_script
from training.tasks import Classification, Multilabel, Task

COMPARED = 16  # samples
TOLERANCE = 1e-3  # largest difference of the outputs, as a share of the largest output
LARGEST_ONNX = 2**31  # bytes of weights in one file
OUTPUTS: dict[Any, tuple[str, str]] = {  # what they are, and what makes probabilities of them, by how a task does so
    Classification.predictions: ("logits", "softmax"),
    Multilabel.predictions: ("logits", "sigmoid"),
    Task.predictions: ("values", "none"),
}
CALLS = {
    "pt2": """import numpy
import torch
example = numpy.load("example.npz")
model = torch.export.load("model.pt2").module()
outputs = model(*(torch.from_numpy(example[name]) for name in {names}))""",
    "onnx": """import numpy
import onnxruntime
example = numpy.load("example.npz")
session = onnxruntime.InferenceSession("model.onnx")
outputs = session.run(None, {{name: example[name] for name in {names}}})[0]""",
    "safetensors": """from safetensors.torch import load_file
weights = load_file("model.safetensors")  # for load_state_dict of the network, or for train.init_from""",
}

Inputs = tuple[Tensor, ...]
Exported = Callable[..., Any]  # from the inputs to the outputs, of tensors


def main(typed: list[str] | None = None) -> Path:
    """Returns the path of the exported network."""
    options = parser(__doc__, "folder to write to; default: RUN/export")
    options.add_argument("--format", choices=CALLS, default="pt2", help="default: pt2, a program of torch.export")
    arguments = options.parse_intermixed_args(typed)

    run = FinishedRun(arguments.run, [*arguments.others, "device=cpu"], for_new_images=True)
    out: Path = arguments.out or run.folder / "export"
    inputs = example(run)
    model = run.trainer.model.to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        outputs = model(*inputs)
    names = {"inputs": list(run.task.inputs), "outputs": names_of(outputs)}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"model.{arguments.format}"
    exported = WRITE[arguments.format](model, inputs, names, path)
    sentence = compare(model, inputs, exported, path)
    describe(run, path, inputs, list(tensors(outputs)), names)
    print(f"{run}: {path}; {sentence}")
    return path


def example(run: FinishedRun) -> Inputs:
    """The network's inputs for some samples, at least two: torch.export would fix a batch size of 1."""
    if isinstance(run.data, NewImages):
        batch = run.data.transform(run.data.batch(COMPARED))
    else:
        with run.loader(run.dataset("test")) as loader:
            (batch,) = islice(loader, 1)
    inputs, _ = run.trainer.inputs_and_labels(batch)
    for name, value in zip(run.task.inputs, inputs, strict=True):
        if not isinstance(value, Tensor):
            raise ConfigError(f"{name!r} is a {type(value).__name__}, and an exported network takes tensors alone")
    parts = [tensor[:COMPARED].contiguous() for tensor in inputs]
    return tuple(torch.cat([part, part])[: max(2, len(part))] for part in parts)


def names_of(outputs: Any) -> list[str]:
    """The keys of a dict, or "outputs", or "outputs_0", ... if there are several."""
    if isinstance(outputs, dict):
        return list(outputs)
    count = len(list(tensors(outputs)))
    return ["outputs"] if count == 1 else [f"outputs_{number}" for number in range(count)]


def export_program(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    try:
        with torch.no_grad():
            return torch.export.export(model, inputs, dynamic_shapes=shapes)
    except Exception as error:  # torch raises many kinds, with pages of advice
        reason, _, more = str(error).strip().partition("\n")
        remedy = (
            "if `forward` has an `if` on the values of a tensor, or makes numbers of them (.item(), .numpy()), "
            "use torch.where, torch.cond, or other functions of torch"
        )
        if "specialized" in more or "Constraints violated" in reason:
            remedy = (
                "`forward` does not take batches of all sizes, as where it makes a number of the size, "
                "int(x.shape[0]), or loops over the samples: use x.shape[0], or -1, and operations on the whole batch"
            )
        raise ConfigError(f"torch.export cannot export {type(model).__name__} ({reason}): {remedy}") from error


def write_pt2(model: nn.Module, inputs: Inputs, names: dict[str, list[str]], path: Path) -> Exported:
    torch.export.save(export_program(model, inputs), path)
    return torch.export.load(path).module()


def write_onnx(model: nn.Module, inputs: Inputs, names: dict[str, list[str]], path: Path) -> Exported:
    """Names inputs and outputs. Raises DataError if a package is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        imported(package, "onnx", "onnx onnxscript onnxruntime")
    program = export_program(model, inputs)
    is_large = sum(weight.nbytes for weight in model.state_dict().values()) >= LARGEST_ONNX
    torch.onnx.export(
        program,
        (),
        path,
        input_names=names["inputs"],
        output_names=names["outputs"],
        external_data=is_large,
        verbose=False,
    )
    session = importlib.import_module("onnxruntime").InferenceSession(path)

    def call(*parts: Tensor) -> list[Tensor]:
        fields = {name: part.numpy() for name, part in zip(names["inputs"], parts, strict=True)}
        return [torch.from_numpy(values) for values in session.run(names["outputs"], fields)]

    return call


def write_safetensors(model: nn.Module, inputs: Inputs, names: dict[str, list[str]], path: Path) -> Exported:
    """Writes each weight by itself, also those that share memory."""
    package = imported("safetensors.torch", "safetensors", "safetensors")
    package.save_file({name: weight.clone().contiguous() for name, weight in model.state_dict().items()}, path)
    weights = package.load_file(path)
    return lambda *parts: torch.func.functional_call(model, weights, parts, tie_weights=False)


def imported(module: str, kind: str, packages: str) -> Any:
    with explained(f"--format {kind} needs packages that are not installed", f"pip install {packages}", ImportError):
        return importlib.import_module(module)


WRITE: dict[str, Callable[..., Exported]] = {"pt2": write_pt2, "onnx": write_onnx, "safetensors": write_safetensors}


def compare(model: nn.Module, inputs: Inputs, exported: Exported, path: Path) -> str:
    """Compares on a batch, and on its first sample alone. Returns a sentence about it.

    If outputs differ by more than TOLERANCE, removes the file and raises ConfigError.
    """
    differences = []
    largest = 0.0
    with torch.no_grad():
        for part in (inputs, tuple(tensor[:1] for tensor in inputs)):
            for ours, theirs in zip(tensors(exported(*part)), tensors(model(*part)), strict=True):
                differences.append(largest_of(ours.double() - theirs.double()))
                largest = max(largest, largest_of(theirs))
    difference = max(differences)
    sentence = f"of {len(inputs[0])} samples its outputs differ by up to {difference:.2g}, and are up to {largest:.2g}"
    if not difference <= TOLERANCE * largest:  # also if one is NaN
        path.unlink()
        raise ConfigError(f"{path.name} computes different outputs: {sentence}")
    return sentence


def largest_of(values: Tensor) -> float:
    return values.double().abs().max().item()


def describe(run: FinishedRun, path: Path, inputs: Inputs, outputs: list[Tensor], names: dict[str, list[str]]) -> None:
    """Writes README.md, preprocessing.json and example.npz beside the network."""
    arrays = dict(zip(names["inputs"], (tensor.numpy() for tensor in inputs), strict=True))
    results = dict(zip(names["outputs"], (tensor.numpy() for tensor in outputs), strict=True))
    example: dict[str, Any] = arrays | results
    np.savez(path.parent / "example.npz", **example)
    classes = run.data.classes
    task = type(run.task)
    meaning, function = OUTPUTS.get(task.predictions, ("of the task", f"{task.__name__}.predictions"))
    about: dict[str, Any] = {"inputs": names["inputs"], "outputs": names["outputs"], "classes": classes}
    about |= {"outputs_are": meaning, "probabilities_by": function}
    new_images = run.data.new_images
    if new_images is not None:
        about |= described(new_images)
    write_whole(path.parent / "preprocessing.json", json.dumps(about, indent=2) + "\n")

    lines = [f"# {run}", "", "Inputs, in order; the batch may have any size:", ""]
    for name, array in arrays.items():
        lines.append(f"- `{name}`: {array.dtype} (batch, {', '.join(map(str, array.shape[1:]))})")
    if new_images is not None:
        lines.append(f"\nFor an image: {about['image']}, of mode {about['mode']}.\n")
        if about["steps"] is None:
            kind = type(run.data.test).__name__
            lines.append(f"1. Make the pixels as {kind} does, in the repository that trained the network.")
        for number, step in enumerate(about["steps"] or [], 1):
            values = ", ".join(f"{key} {value}" for key, value in step.items() if key not in ("step", "how"))
            lines.append(f"{number}. {step['step']} ({values}): {step['how']}.")
        lines.append(f"\nThen {about['then']}: mean {about['mean']}, std {about['std']}.")
        lines.append(f"Resizing is {about['resize']}. preprocessing.json has these numbers.")
    lines += ["", "```python", CALLS[path.suffix[1:]].format(names=names["inputs"]), "```", ""]
    lines += ["example.npz has prepared inputs, and the network's outputs for them: compare yours."]
    lines += [f"Outputs are {meaning}; for probabilities: {function}."]
    if classes and meaning == "logits":
        lines += ["The classes, in order:", ""]
        lines += [f"    {name}" for name in classes]
    write_whole(path.parent / "README.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    run_script(main)
