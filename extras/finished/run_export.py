"""Exports the network of a run, to be used without this repository.

    python scripts/export.py RUN                   # RUN/export/model.pt2, a program of torch.export
    python scripts/export.py RUN --format onnx     # RUN/export/model.onnx; pip install onnx onnxscript onnxruntime

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. The exported network is compared with
the original on images of the run's test set (KEY=VALUE replaces a setting, as in data.root=DIR). README.md and
preprocessing.json beside it say how to prepare images. No code in RUN is executed: see scripts/evaluate.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command import parser, run_script
from training.config import ConfigError
from training.finished.export import FORMATS, check_packages, describe, export
from training.finished.finished_run import FinishedRun, refused_as, with_run
from training.finished.prepare import Prepare
from training.trust import check_links

COMPARED = 16  # images


def main(arguments: list[str] | None = None) -> None:
    options = with_run(parser(__doc__))
    options.add_argument("overrides", nargs="*", default=[], help="settings to replace, such as data.root=DIR")
    options.add_argument("--format", choices=tuple(FORMATS), default="torch", help="default: torch")
    options.add_argument("--out", type=Path, help="folder to write to; default: RUN/export")
    options.add_argument("--tolerance", type=float, default=1e-3, help="largest difference, as a share of the outputs")
    given = options.parse_intermixed_args(arguments)
    endings = {Path(file).suffix: name for name, (file, _) in FORMATS.items()}
    if given.out and (name := endings.get(given.out.suffix)):
        raise ConfigError(
            f"--out {given.out}: give a folder, for the network and its README.md: --format {name} --out "
            f"{given.out.with_suffix('')}"
        )
    if given.format == "onnx":
        check_packages()

    run = FinishedRun(given.run, [*given.overrides, "device=cpu"], given.trust)
    run.image_shape("export.py")
    prepare = Prepare(run.spec.dataset)
    check_links(run.folder, "export", given.trust)
    out: Path = given.out or run.folder / "export"
    with run.loader(run.dataset("test"), num_workers=0, preload_depth=0) as loader:
        images = next(iter(loader))["image"][:COMPARED].contiguous()
    images = torch.cat([images, images])[: max(2, len(images))]  # torch.export would fix a batch size of 1
    model = run.model.to(memory_format=torch.contiguous_format)
    with refused_as(f"{run} cannot be exported"):
        compared = export(model, images, out, given.format, given.tolerance)
    describe(run.spec, prepare, out, str(run))
    print(f"{run}: {out / FORMATS[given.format][0]}; {compared}")


if __name__ == "__main__":
    run_script(main)
