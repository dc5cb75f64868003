"""HuggingFace: a dataset of images and labels that the package `datasets` can load.

The package finds, downloads and stores the samples. Here the images' encoded bytes are read from its tables, which are
mapped into memory, and only the crops are decoded, as in data/image_folder.py.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, did_you_mean
from data.images.crops import CroppedDataset
from data.images.decoders import choose
from data.images.decoding import image_errors
from data.labels import class_indices

INTEGERS = {"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
STRINGS = {"string", "large_string"}


class HuggingFace(CroppedDataset):
    """The training or the test images of a dataset of the Hugging Face hub or of a local folder.

    path: a dataset's name on the hub, such as ylecun/mnist, or a folder of parquet, arrow or image files that the
    package `datasets` can load. At first use it converts parquet files, in its cache, to ones that can be mapped.
    name: the dataset's configuration to load, if it has several.
    train_split, test_split: splits, also "train[:90%]" and "train+validation"; None: train, and test or validation.
    image, label: columns; None: those with the features Image and ClassLabel. A column of integers or strings may have
    the labels too: its values in the training split, sorted, are the classes.
    `decoder` is as in ImageFolder; for the other arguments and the samples see CroppedDataset.

    Raises DataError if the package is not installed, the dataset cannot be loaded, or its columns do not fit, and when
    it reads an image that is damaged.
    """

    def __init__(
        self,
        train: bool,
        path: str | Path | None = None,
        name: str | None = None,
        train_split: str | None = None,
        test_split: str | None = None,
        image: str | None = None,
        label: str | None = None,
        decoder: str = "auto",
        **crops: Any,
    ) -> None:
        super().__init__(train, **crops)
        if not path:
            raise DataError(
                "data.path is not set; set it to a dataset of the Hugging Face hub, such as ylecun/mnist, or to a "
                "folder of parquet, arrow or image files"
            )
        self._decoders = choose(decoder)
        splits = load(str(path), name)
        train_rows = rows = choose_rows(splits, "data.train_split", train_split, ("train",))
        if not train:
            rows = choose_rows(splits, "data.test_split", test_split, ("test", "validation"))
        self._where = f"{path}, {'train' if train else 'test'} split"
        self._image = image = choose_column(rows.features, "data.image", image, "Image")
        label = choose_column(rows.features, "data.label", label, "ClassLabel")
        if hasattr(rows.features[label], "names"):
            self.classes, known = tuple(rows.features[label].names), np.arange(rows.features[label].num_classes)
        else:
            known = np.unique(read_labels(train_rows, label, f"{path}, train split"))
            self.classes = tuple(str(value) for value in known)
        remedy = "choose other splits (data.train_split, data.test_split) or another column (data.label)"
        self.labels = class_indices(read_labels(rows, label, self._where), known, self.path, remedy)
        encoded = importlib.import_module("datasets").Image(decode=False)
        try:
            self._rows = rows.select_columns([image]).cast_column(image, encoded)
        except NotImplementedError as error:
            raise DataError(
                f"data.image={image}: this column of {path} has no images, but {rows.features[image]}; "
                "choose another one"
            ) from error

    def path(self, index: int) -> str:
        return f"{self._where}, row {index}"

    def encoded(self, index: int) -> tuple[bytes, str]:
        image = self._rows[index][self._image] or {"bytes": None, "path": None}  # None: the row has no image
        data, file = image["bytes"], image["path"]
        name = f"{self.path(index)} ({file})" if file else self.path(index)
        with image_errors(name):
            return Path(file).read_bytes() if data is None and file else data or b"", name


def load(path: str, name: str | None) -> dict[str, Any]:
    """The splits of a dataset by their names. Raises DataError if it cannot be loaded."""
    try:
        datasets = importlib.import_module("datasets")
        if int(datasets.__version__.split(".")[0]) < 4:
            raise ImportError(f"version {datasets.__version__} can run a dataset's own code")
    except ImportError as error:
        raise DataError(f"data=huggingface needs the package datasets ({error}): pip install 'datasets>=4'") from error
    folder = Path(path).expanduser()
    # A bare name may be one of the package's own builders, such as pandas, which reads files of the current folder.
    if not folder.is_dir() and (path.startswith(("/", ".", "~")) or "/" not in path):
        raise DataError(f"data.path={path} is not a folder; set it to one, or to OWNER/NAME of a dataset on the hub")
    try:
        if not folder.is_dir():
            return datasets.load_dataset(path, name)
        with_bars = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            if not any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
                return datasets.load_dataset(str(folder.resolve()), name)
            saved = datasets.load_from_disk(str(folder))
            return saved if isinstance(saved, dict) else {"train": saved}
        finally:
            if with_bars:
                datasets.enable_progress_bars()
    except Exception as error:  # the package raises errors of its own, of huggingface_hub, httpx, pyarrow and Python
        raise DataError(f"data.path={path} cannot be loaded: {reason_and_remedy(error)}") from error


def reason_and_remedy(error: Exception) -> str:
    """Why the package could not load a dataset, and what to do about it."""
    reason = str(error).strip().split("\n")[0].rstrip(".")
    kind = type(error).__name__
    if "gated" in reason or "authenticated" in reason:
        return f"{reason}; ask for access on its page on the hub, then log in with `hf auth login`"
    if isinstance(error, ConnectionError) or kind in ("OfflineModeIsEnabled", "LocalEntryNotFoundError"):
        return f"{reason}; connect to the network, or set data.path to a local folder"
    if "onfig" in reason:  # the name of a configuration is missing or unknown
        return f"{' '.join(str(error).split())}; set data.name"
    if kind == "DatasetNotFoundError":
        return f"{reason}; check its name, or set data.path to a local folder"
    return f"{kind}: {reason}"


def choose_rows(splits: dict[str, Any], key: str, given: str | None, usual: Sequence[str]) -> Any:
    """The rows of the split `given`, in the package's syntax; without it, of the first of `usual` that exists."""
    chosen = given or next((split for split in usual if split in splits), None)
    known = f"the dataset has the splits {', '.join(splits)}"
    if chosen is None:
        raise DataError(f"{key} is not set, and {known}; set it to one, or to a part of one, such as train[90%:]")
    datasets = importlib.import_module("datasets")
    try:
        parts = datasets.ReadInstruction.from_spec(chosen).to_absolute({name: len(splits[name]) for name in splits})
    except ValueError as error:
        raise DataError(
            f"{key}={chosen}: {known}; set {key} to one, or to a part of one, such as train[90%:]"
        ) from error
    rows = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts if part.from_ < part.to]
    if not rows:
        raise DataError(f"{key}={chosen} has no rows; set {key} to another split")
    return datasets.concatenate_datasets(rows).with_format(None)  # saved datasets keep their format


def choose_column(features: dict[str, Any], key: str, given: str | None, kind: str) -> str:
    """The column `given`, or else the only one whose feature is of this kind."""
    found = [given] if given else [name for name, feature in features.items() if type(feature).__name__ == kind]
    if len(found) == 1 and found[0] in features:
        return found[0]
    columns = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in features.items())
    if given:
        raise DataError(f"{key}={given}: {did_you_mean(given, features)}the columns are {columns}")
    raise DataError(f"{key} is not set, and {len(found)} columns are of the kind {kind}; set it to one of {columns}")


def read_labels(rows: Any, label: str, where: str) -> np.ndarray:
    """The labels (N,), integers or strings, without reading images."""
    kind = getattr(rows.features[label], "dtype", rows.features[label])
    if kind not in INTEGERS | STRINGS:
        raise DataError(
            f"data.label={label}: {where} has {kind} in this column, not integers or strings; set it to another column"
        )
    values = rows.select_columns([label])[:][label]
    if None in values:
        row = values.index(None)
        raise DataError(f"data.label={label}: {where}, row {row} has no label; remove the row or choose another split")
    return np.array(values)
