"""Reads every sample of a dataset once, and writes a page and a table about them.

    python extras/inspect/inspect_data.py data=image_folder data.root=DIR
    python extras/inspect/inspect_data.py data=image_table data.table=FILE.csv data.val_fraction=0.1 --out looked_at

The settings are those of train.py. The exit code is 1 if a sample cannot be read, or the settings cannot be used.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import optional
from data.errors import explained
from data.subset import Fold, Subset, split
from extras.inspect.findings import SHOWN, Findings, Read
from extras.inspect.records import Records, image_of
from loaders import WorkerLoader, available_cores, seed_globals
from training.build import any_target
from training.checks import is_stream
from training.config import ROOT, Config, ConfigError, checked
from training.datasets import build_data, take_share
from training.files import write_whole
from training.launch import Extras
from training.look import thumbnail, write_page
from training.preprocessing import preprocessing_of
from training.script import parser, run_script

TEMPLATE = Path(__file__).with_name("inspect.html")
PICTURES = 25
SIDE = 112  # pixels of a picture, at most


def main(typed: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("settings", nargs="*", help="as for train.py: data=image_folder, data.root=DIR")
    options.add_argument(
        "--out", type=Path, default=Path("outputs/inspected"), help="folder to write into (outputs/inspected)"
    )
    options.add_argument("--workers", type=int, default=available_cores(), help="processes (as many as cores)")
    arguments = options.parse_intermixed_args(typed)
    with any_target():
        config = configured(arguments.settings)
        records = records_of(config)
    findings = Findings(list(read_all(config, records, arguments.workers)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.out / "samples.csv", findings.csv())
    path = arguments.out / "index.html"
    write_page(
        path,
        TEMPLATE,
        title=" ".join(arguments.settings) or "the default data",
        findings=findings,
        shown=SHOWN,
        pictures=pictures(records["train"], findings, config.seed),
    )
    print(f"{path}: {len(findings.reads):,} samples, {', '.join(findings.parts)}; samples.csv has a row for each")
    for sentence in findings.sentences():
        print(sentence)
    if findings.unreadable:
        sys.exit(f"error: {findings.unreadable[0].record.error}")


def configured(overrides: list[str]) -> Config:
    Plugins.instance().register(Extras)
    with (
        explained(f"{' '.join(overrides)} cannot be used", "give GROUP=NAME or SECTION.KEY=VALUE"),
        initialize_config_dir(str(ROOT / "conf"), version_base="1.3"),
    ):
        return checked(compose("config", overrides=overrides))


def records_of(config: Config) -> dict[str, Records]:
    """The records of the training and of the test set. The files themselves are read, not a cache of them."""
    data = dict(config.data)
    take_share(data)
    for key in ("collate", "mean", "std"):
        data.pop(key)
    if data.pop("streaming"):
        raise ConfigError("data.streaming=true: set it to false, to look at each sample")
    if "cache" in data:
        data["cache"] = None
    preprocessing = preprocessing_of(config.model)
    inputs = config.task.get("inputs", "image")
    fields = [inputs] if isinstance(inputs, str) else list(inputs)
    records = {}
    for part in ("train", "test"):
        dataset = build_data("data", data, preprocessing, config.seed, train=part == "train")
        if is_stream(dataset):
            raise ConfigError(f"{type(dataset).__name__} is a stream, whose samples cannot be read by number")
        records[part] = Records(dataset, fields, config.task.get("label", "label"))
    return records


def read_all(config: Config, records: dict[str, Records], workers: int) -> Iterator[Read]:
    """Reads each sample, with a bar. Samples that are kept for validation are in the set val."""
    with tqdm(total=sum(map(len, records.values())), desc="reading", unit="sample", disable=None) as bar:
        for part, samples in records.items():
            parts = [part] * len(samples)
            if part == "train":
                for index in validation(samples.dataset, take_share(dict(config.data))):
                    parts[index] = "val"
            with WorkerLoader[Any](samples, 8, num_workers=workers, collate_fn=list, seed=config.seed) as loader:
                for batch in loader:
                    for record in batch:
                        yield Read(parts[record.number], record)
                    bar.update(len(batch))


def validation(dataset: Any, share: float | Fold) -> list[int]:
    """The indices of the samples that training would keep for validation. Those of a mixture are not told apart."""
    if not share and optional(dataset, "is_val") is None:
        return []
    _, val = split(dataset, share)
    return val.indices.tolist() if isinstance(val, Subset) else []


def pictures(samples: Records, findings: Findings, seed: int) -> list[tuple[str, Read]]:
    """A picture of some training samples, chosen by the seed, as the network gets them before they are normalised."""
    reads = [read for read in findings.reads if read.part == "train" and read.record.width]
    chosen = np.random.default_rng(seed).permutation(len(reads))[:PICTURES]
    seed_globals(seed)
    drawn = []
    for number in sorted(chosen.tolist()):
        with suppress(Exception):  # a random transform may fail now, though it did not when the sample was read
            drawn.append((picture(samples, reads[number]), reads[number]))
    return drawn


def picture(samples: Records, read: Read) -> str:
    """A training sample as the address of an image in a page. Floats are shown from their lowest to their highest."""
    value, _ = samples.value_and_label(samples.dataset[read.record.number])
    image = image_of(value)
    assert image is not None
    if image.dtype != np.uint8:
        low, high = float(image.min()), float(image.max())
        image = (255 * (image - low) / (high - low or 1)).astype(np.uint8)
    return thumbnail(image, SIDE)


if __name__ == "__main__":
    run_script(main)
