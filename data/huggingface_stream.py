"""HuggingFaceStream: data=huggingface data.streaming=true, which neither downloads nor converts files before."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from data.errors import DataError
from data.huggingface import HuggingFace, choose_column, encoded_rows, file_of, load
from data.images.stream import CroppedStream

SHARDS = 64  # of a dataset that was saved by the package: it can be cut anywhere


class HuggingFaceStream(CroppedStream):
    """The images of a whole split in the order of its files, of which each of torch's workers reads its share.

    `classes` must be given if the feature of the labels has no names.
    """

    like = HuggingFace

    def open(self, options: SimpleNamespace) -> Sequence[str] | None:
        splits = load(str(options.path), options.name, streaming=True)
        key, usual = ("train_split", "train") if self.train else ("test_split", "test")
        split = getattr(options, key) or (usual if self.train or usual in splits else "validation")
        if split not in splits:
            raise DataError(f"data.{key}={split}: a stream is a whole split; set it to one of {', '.join(splits)}")
        rows, self._where = splits[split], f"{options.path}, {split} split"
        if hasattr(rows, "to_iterable_dataset"):
            rows = rows.to_iterable_dataset(min(SHARDS, len(rows)))
        image = choose_column(rows.features, "data.image", options.image, "Image")
        label = choose_column(rows.features, "data.label", options.label, "ClassLabel")
        self._rows, self._columns = encoded_rows(rows, [image, label], options.path), (image, label)
        self._loaded: dict[str, Any] | None = None
        return options.classes or getattr(rows.features[label], "names", None)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator is, as the package says it."""
        return dict(self._rows.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets where the next iterator begins."""
        self._loaded = state

    def encoded(self) -> Iterator[tuple[bytes, str, Any]]:
        self._rows.load_state_dict(self._loaded)  # for None it begins at the start
        self._loaded = None
        for row in self._rows:
            image, label = (row[column] for column in self._columns)
            yield *file_of(image, self._where), label
