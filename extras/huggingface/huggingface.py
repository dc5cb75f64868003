"""HuggingFace: a dataset of images and labels that the package `datasets` can load.

The package finds, downloads and stores the samples. This file reads the images' encoded bytes from the package's
tables, which are mapped into memory, and decodes only the crops, as data/image_folder.py does.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from data.errors import DataError, as_names, explained, home_path
from data.images.crops import CroppedDataset, class_indices
from data.images.decoding import image_errors
from data.images.stream import CroppedStream, State

SHARDS = 64  # parts of a dataset that the package has saved: it can be cut anywhere
LABELS = {"bool", "string", "large_string", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}


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
        splits = load(str(path), name, label)
        train_rows = rows = choose_rows(splits, "data.train_split", train_split, ("train",))
        if not train:
            rows = choose_rows(splits, "data.test_split", test_split, ("test", "validation"))
        self._where = f"{path}, {'train' if train else 'test'} split"
        self._image = image = choose_column(rows.features, "data.image", image, "Image")
        label = choose_column(rows.features, "data.label", label, "ClassLabel")
        feature = rows.features[label]
        are_places = not classes and hasattr(feature, "names")
        if classes:
            self.classes = as_names("data.classes", classes)
        elif are_places:
            self.classes = tuple(feature.names)
        else:
            self.classes = tuple(map(str, np.unique(read_labels(train_rows, label, f"{path}, train split"))))
        self.labels = class_indices(
            read_labels(rows, label, self._where),
            self.classes,
            self.path,
            "choose other splits (data.train_split, data.test_split) or another column (data.label)",
            are_places,
        )
        self._rows = encoded_rows(rows, [image], path)

    def path(self, index: int) -> str:
        return f"{self._where}, row {index:d}"

    def encoded(self, index: int) -> tuple[bytes, str]:
        return file_of(self._rows[index][self._image], self.path(index))


class HuggingFaceStream(CroppedStream):
    """data.streaming=true: the images of a whole split, in the order of its files, without downloading them first.

    Each of torch's workers reads its share. `classes` must be set if the feature of the labels has no names.
    """

    like = HuggingFace

    def open(self, options: SimpleNamespace) -> Sequence[str] | None:
        splits = load(str(options.path), options.name, options.label, streaming=True)
        key, usual = ("train_split", "train") if self.train else ("test_split", "test")
        if not self.train and usual not in splits:
            usual = "validation"
        split = getattr(options, key) or usual
        if split not in splits:
            raise DataError(f"data.{key}={split}: a stream is a whole split; set it to one of {', '.join(splits)}")
        self._where = f"{options.path}, {split} split"
        rows = splits[split]
        if hasattr(rows, "to_iterable_dataset"):
            rows = rows.to_iterable_dataset(min(SHARDS, len(rows)))
        image = choose_column(rows.features, "data.image", options.image, "Image")
        label = choose_column(rows.features, "data.label", options.label, "ClassLabel")
        self._columns = (image, label)
        self._are_numbers = hasattr(rows.features[label], "names")  # else labels are names, also integers
        self._rows = encoded_rows(rows, [image, label], options.path)
        return options.classes or getattr(rows.features[label], "names", None)

    def state_dict(self) -> State:
        """The position of the newest iterator, as the package describes it."""
        return dict(self._rows.state_dict())

    def encoded(self, state: State | None) -> Iterator[tuple[bytes, str, Any]]:
        self._rows.load_state_dict(state)
        for row in self._rows:
            image, label = (row[column] for column in self._columns)
            yield *file_of(image, self._where), label if self._are_numbers else str(label)


def encoded_rows(rows: Any, columns: list[str], path: object) -> Any:
    """The rows with these columns; the first has images, which become encoded files."""
    image = columns[0]
    encoded = importlib.import_module("datasets").Image(decode=False)
    with explained(
        f"data.image={image}: this column of {path} has no images, but {rows.features[image]}",
        "choose another one",
        NotImplementedError,
    ):
        return rows.select_columns(columns).cast_column(image, encoded)


def file_of(image: dict[str, Any] | None, where: str) -> tuple[bytes, str]:
    """The bytes of an encoded image, and its name for errors. Raises DataError if its file cannot be read."""
    if image is None:  # the row has no image
        return b"", where
    data = image["bytes"]
    file = image["path"]
    name = f"{where} ({file})" if file else where
    if data is None and file:
        with image_errors(name):
            data = Path(file).read_bytes()
    return data or b"", name


def load(path: str, name: str | None, label: str | None, **options: Any) -> dict[str, Any]:
    """The splits of a dataset by their names. Raises DataError if it cannot be loaded.

    label: the column of the labels, whose names each split keeps; None: all columns of labels.
    """
    with explained("data=huggingface needs the package datasets", "pip install 'datasets>=4'", ImportError):
        datasets = importlib.import_module("datasets")
        if getattr(datasets, "__file__", None) is None:
            hiding = next(iter(datasets.__path__))
            raise ImportError(f"it is not installed, so Python took the folder {hiding} for it")
        if not hasattr(datasets, "load_from_disk"):
            raise DataError(f"data=huggingface needs the package datasets, which {datasets.__file__} hides: rename it")
        if int(datasets.__version__.split(".")[0]) < 4:
            raise ImportError(f"version {datasets.__version__} can run a dataset's own code")
    folder = home_path(path)
    # A bare name may be one of the package's own builders, such as pandas, which reads files of the current folder.
    if not folder.is_dir() and (path.startswith(("/", ".", "~")) or "/" not in path):
        raise DataError(f"data.path={folder} is not a folder; set it to one, or to OWNER/NAME of a dataset on the hub")
    with explained(
        f"data.path={path} cannot be loaded",
        "check data.path, data.name and the network; for a gated dataset log in with `hf auth login`",
    ):
        if any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(str(folder))
            return saved if isinstance(saved, dict) else {"train": saved}
        if folder.is_dir():
            path = str(folder.resolve())
            kind, files = files_with_other_names(datasets, path, name, label)
            if files:
                return {
                    split: datasets.load_dataset(kind, data_files={split: files[split]}, split=split, **options)
                    for split in files
                }
        return datasets.load_dataset(path, name, **options)


def files_with_other_names(
    datasets: Any, path: str, name: str | None, label: str | None
) -> tuple[str, dict[str, list[str]]]:
    """The kind of a local folder's files, and the files by split if the splits have different names of classes.

    The package would give all splits the names of the first one, and leave their numbers as they are.
    Raises DataError if files of one split have different names.
    """
    builder = datasets.load_dataset_builder(path, name)
    if builder.name not in ("parquet", "arrow"):  # others do not state the names
        return builder.name, {}
    files = {str(split): [*paths] for split, paths in builder.config.data_files.items()}
    of_splits = []
    for paths in files.values():
        of_split: dict[str, list[str]] = {}
        for file in paths:
            features = datasets.load_dataset(builder.name, data_files=[file], split="train", streaming=True).features
            columns = [column for column in features if hasattr(features[column], "names")]
            names = {column: features[column].names for column in columns if label in (None, column)}
            of_split = of_split or names
            if names and names != of_split:
                raise DataError(
                    f"{file} has the classes {names}, and files before it in the same split have {of_split}: write "
                    "them with the same ones, as the package gives all files of a split the names of the first"
                )
        if of_split:
            of_splits.append(of_split)
    have_equal_names = all(names == of_splits[0] for names in of_splits)
    return builder.name, {} if have_equal_names else files


def choose_rows(splits: dict[str, Any], key: str, split: str | None, usual: Sequence[str]) -> Any:
    """The rows of the split, in the package's syntax; of None the first of `usual` that exists."""
    chosen = split or next((name for name in usual if name in splits), "")
    datasets = importlib.import_module("datasets")
    lengths = {name: len(samples) for name, samples in splits.items()}
    rows = []
    with suppress(ValueError):  # the package does not know the split, or its syntax
        for part in datasets.ReadInstruction.from_spec(chosen).to_absolute(lengths):
            if part.from_ < part.to:
                rows.append(splits[part.splitname].select(range(part.from_, part.to)))
    if not rows:
        raise DataError(
            f"{key}={split} has no rows; set it to one of the splits {', '.join(splits)}, or to a part, such as "
            "train[90%:]"
        )
    with explained(f"{key}={split}: these splits cannot be joined", "choose one, or write them with equal columns"):
        return datasets.concatenate_datasets(rows).with_format(None)  # saved datasets keep their format


def choose_column(features: dict[str, Any], key: str, column: str | None, kind: str) -> str:
    """The column, or for None the only one whose feature is of this kind."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    candidates = [column] if column else [name for name in kinds if kinds[name] == kind]
    if len(candidates) == 1 and candidates[0] in features:
        return candidates[0]
    columns = ", ".join(f"{name} ({kinds[name]})" for name in kinds)
    hint = "" if column else f"{len(candidates)} columns are of the kind {kind}; "
    raise DataError(f"{key}={column}: {hint}set it to one of the columns {columns}")


def read_labels(rows: Any, label: str, where: str) -> np.ndarray:
    """The labels (N,), integers or strings, without reading images."""
    kind = getattr(rows.features[label], "dtype", rows.features[label])
    if str(kind) not in LABELS:
        raise DataError(
            f"data.label={label}: {where} has {kind} in this column, not integers or strings; set it to another column"
        )
    values = rows.select_columns([label])[:][label]
    if None in values:
        row = values.index(None)
        raise DataError(f"data.label={label}: {where}, row {row} has no label; remove the row or choose another split")
    return np.array(values)
