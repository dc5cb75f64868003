"""HuggingFaceStream: data=huggingface data.streaming=true, which neither downloads nor converts files before."""

from collections.abc import Iterator, Sequence
from typing import Any

from data.errors import DataError
from data.huggingface import choose_column, encoded_rows, file_of, load
from data.images.stream import CroppedStream

SHARDS = 64  # of a dataset that was saved by the package: it can be cut anywhere


class HuggingFaceStream(CroppedStream):
    """The images of a whole split in the order of its files, of which each of torch's workers reads its share.

    The arguments are those of HuggingFace; `classes` must be given if the feature of the labels has no names.
    """

    def __init__(
        self,
        train: bool,
        path: str | None = None,
        name: str | None = None,
        train_split: str | None = None,
        test_split: str | None = None,
        image: str | None = None,
        label: str | None = None,
        classes: Sequence[str] | None = None,
        **crops: Any,
    ) -> None:
        splits = load(str(path), name, streaming=True)
        split = train_split or "train" if train else test_split or ("test" if "test" in splits else "validation")
        if split not in splits:
            key = "data.train_split" if train else "data.test_split"
            raise DataError(f"{key}={split}: a stream is a whole split; set it to one of {', '.join(splits)}")
        rows, self._where = splits[split], f"{path}, {split} split"
        if hasattr(rows, "to_iterable_dataset"):
            rows = rows.to_iterable_dataset(min(SHARDS, len(rows)))
        image = choose_column(rows.features, "data.image", image, "Image")
        label = choose_column(rows.features, "data.label", label, "ClassLabel")
        super().__init__(train, classes or getattr(rows.features[label], "names", None), **crops)
        self._rows, self._columns = encoded_rows(rows, [image, label], path), (image, label)
        self._loaded: dict[str, Any] | None = None

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
