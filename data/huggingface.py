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
from data.images.crops import CroppedDataset, class_indices
from data.images.decoding import image_errors

LABELS = {"bool", "string", "large_string", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


class HuggingFace(CroppedDataset):
    """The training or the test images of a dataset of the Hugging Face hub or of a local folder.

    path: a dataset's name on the hub, such as ylecun/mnist, or a folder of parquet, arrow or image files that the
    package `datasets` can load. At first use it converts parquet files, in its cache, to ones that can be mapped.
    name: the dataset's configuration to load, if it has several.
    train_split, test_split: splits, also "train[:90%]" and "train+validation"; None: train, and test or validation.
    image, label: columns; None: those with the features Image and ClassLabel. A column of integers or strings may have
    the labels too: its values are the names in `classes`, or else those in the training split, sorted.
    For the other arguments and the samples see CroppedDataset.

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
        classes: Sequence[str] | None = None,
        **crops: Any,
    ) -> None:
        super().__init__(train, **crops)
        splits = load(str(path), name)
        train_rows = rows = choose_rows(splits, "data.train_split", train_split, ("train",))
        if not train:
            rows = choose_rows(splits, "data.test_split", test_split, ("test", "validation"))
        self._where = f"{path}, {'train' if train else 'test'} split"
        self._image = image = choose_column(rows.features, "data.image", image, "Image")
        label = choose_column(rows.features, "data.label", label, "ClassLabel")
        if classes:
            self.classes, known = tuple(map(str, classes)), np.array(list(classes))
        elif hasattr(rows.features[label], "names"):
            self.classes, known = tuple(rows.features[label].names), np.arange(rows.features[label].num_classes)
        else:
            known = np.unique(read_labels(train_rows, label, f"{path}, train split"))
            self.classes = tuple(str(value) for value in known)
        remedy = "choose other splits (data.train_split, data.test_split) or another column (data.label)"
        self.labels = class_indices(read_labels(rows, label, self._where), known, self.path, remedy)
        self._rows = encoded_rows(rows, [image], path)

    def path(self, index: int) -> str:
        return f"{self._where}, row {index}"

    def encoded(self, index: int) -> tuple[bytes, str]:
        return file_of(self._rows[index][self._image], self.path(index))


def encoded_rows(rows: Any, columns: list[str], path: object) -> Any:
    """The rows with these columns; the first has images, which become encoded files."""
    image, encoded = columns[0], importlib.import_module("datasets").Image(decode=False)
    try:
        return rows.select_columns(columns).cast_column(image, encoded)
    except NotImplementedError as error:
        reason = f"this column of {path} has no images, but {rows.features[image]}"
        raise DataError(f"data.image={image}: {reason}; choose another one") from error


def file_of(image: dict[str, Any] | None, where: str) -> tuple[bytes, str]:
    """The bytes of an encoded image, and its name for errors. Raises DataError if its file cannot be read."""
    data, file = (image["bytes"], image["path"]) if image else (b"", None)  # None: the row has no image
    name = f"{where} ({file})" if file else where
    with image_errors(name):
        return Path(file).read_bytes() if data is None and file else data or b"", name


def load(path: str, name: str | None, **options: Any) -> dict[str, Any]:
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
        if any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(str(folder))
            return saved if isinstance(saved, dict) else {"train": saved}
        return datasets.load_dataset(str(folder.resolve()) if folder.is_dir() else path, name, **options)
    except Exception as error:  # the package raises errors of its own, of huggingface_hub, httpx, pyarrow and Python
        reason, kind = " ".join(str(error).split()), type(error).__name__
        remedies = {
            "gated": "ask for access on its page on the hub, then log in with `hf auth login`",
            "onfig": "set data.name",  # the name of a configuration is missing or unknown
            "": "check the name and the network, or set data.path to a local folder",
        }
        remedy = next(remedy for word, remedy in remedies.items() if word in reason)
        raise DataError(f"data.path={path} cannot be loaded: {kind}: {reason}; {remedy}") from error


def choose_rows(splits: dict[str, Any], key: str, given: str | None, usual: Sequence[str]) -> Any:
    """The rows of the split `given`, in the package's syntax; without it, of the first of `usual` that exists."""
    chosen = given or next((split for split in usual if split in splits), None)
    remedy = f"the dataset has the splits {', '.join(splits)}; set {key} to one, or to a part, such as train[90%:]"
    if chosen is None:
        raise DataError(f"{key} is not set, and {remedy}")
    datasets = importlib.import_module("datasets")
    try:
        parts = datasets.ReadInstruction.from_spec(chosen).to_absolute({name: len(splits[name]) for name in splits})
    except ValueError as error:
        raise DataError(f"{key}={chosen}: {remedy}") from error
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
    if kind not in LABELS:
        reason = f"{where} has {kind} in this column, not integers or strings"
        raise DataError(f"data.label={label}: {reason}; set it to another column")
    values = rows.select_columns([label])[:][label]
    if None in values:
        row = values.index(None)
        raise DataError(f"data.label={label}: {where}, row {row} has no label; remove the row or choose another split")
    return np.array(values)
