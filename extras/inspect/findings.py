"""Findings: what the records of all samples show."""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from extras.inspect.records import ENLARGED, LONG, Record

SHOWN = 200  # rows of a table in the page; samples.csv has all


class Read(NamedTuple):
    """A record, and the set that its sample is in: train, val or test."""

    part: str
    record: Record

    def __str__(self) -> str:
        return f"{self.part}: {self.record.name}"


class Kind(NamedTuple):
    """Images that are worth a look. effect: what becomes of them."""

    name: str
    effect: str
    has: Callable[[Record], bool]


KINDS = (
    Kind("EXIF-rotated", "turned upright", lambda record: record.file.is_rotated),
    Kind("transparent", "without alpha: pixels have the colours that are stored", lambda r: r.file.is_transparent),
    Kind("CMYK", "converted by Pillow's formula, without a colour profile", lambda r: r.file.mode == "CMYK"),
    Kind("very small", f"enlarged by more than {ENLARGED}", lambda record: record.is_small),
    Kind("very long", f"a side is over {LONG} times the other: a square crop shows little", lambda r: r.is_long),
)


class Findings:
    """unreadable: the samples that cannot be read.

    shared: groups of equal samples that are in more than one set; contradicting: that have more than one label;
    repeated: all groups of equal samples.
    """

    def __init__(self, reads: list[Read]) -> None:
        self.reads = reads
        self.unreadable = [read for read in reads if read.record.error]
        groups = defaultdict[str, list[Read]](list)
        for read in reads:
            if read.record.digest:
                groups[read.record.digest].append(read)
        self.repeated = [group for group in groups.values() if len(group) > 1]
        self.shared = [group for group in self.repeated if len({read.part for read in group}) > 1]
        self.contradicting = [group for group in self.repeated if len({read.record.label for read in group}) > 1]
        self.parts = list(dict.fromkeys(read.part for read in reads))

    def kinds(self) -> list[tuple[Kind, list[Read]]]:
        """The kinds that there are, with their samples."""
        found = [(kind, [read for read in self.reads if kind.has(read.record)]) for kind in KINDS]
        return [(kind, reads) for kind, reads in found if reads]

    def classes(self) -> list[tuple[str, list[int]]]:
        """Each label with its number of samples in each part, the most frequent first."""
        counts = Counter((read.record.label, read.part) for read in self.reads)
        labels = Counter(read.record.label for read in self.reads)
        return [(label, [counts[label, part] for part in self.parts]) for label, _ in labels.most_common()]

    def modes(self) -> list[tuple[str, int]]:
        """Formats and modes of files, such as "JPEG RGB", with their numbers."""
        files = [read.record.file for read in self.reads if read.record.file.format]
        return Counter(f"{file.format} {file.mode}" for file in files).most_common()

    def sizes(self) -> list[tuple[str, list[int]]]:
        """The smallest, the middle and the largest width, height and shorter side of the images, in pixels."""
        sizes = np.array([(read.record.width, read.record.height) for read in self.reads if read.record.width])
        if not len(sizes):
            return []
        columns = {"width": sizes[:, 0], "height": sizes[:, 1], "shorter side": sizes.min(1)}
        return [(name, np.quantile(values, [0, 0.5, 1]).astype(int).tolist()) for name, values in columns.items()]

    def statistics(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation of each channel over the training samples, for pixels scaled to 0..1."""
        training = [read.record.moments for read in self.reads if read.part == "train"]
        moments = [values for values in training if values is not None]
        if len({values.shape for values in moments}) != 1:
            return None
        mean, square = np.stack(moments).astype(np.float64).mean(0)
        deviation = np.sqrt(np.maximum(square - mean**2, 0))
        return mean.round(4).tolist(), deviation.round(4).tolist()

    def csv(self) -> str:
        """A row per sample."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        columns = ["set", "index", "file", "label", "width", "height", "format", "mode", "notes", "pixels", "error"]
        writer.writerow(columns)
        for part, record in self.reads:
            notes = ", ".join(kind.name for kind in KINDS if kind.has(record))
            size: list[Any] = [record.width or "", record.height or ""]
            file = [record.file.format, record.file.mode]
            last = [notes, record.digest, record.error]
            writer.writerow([part, record.number, record.name, record.label, *size, *file, *last])
        return text.getvalue()

    def sentences(self) -> list[str]:
        """What should be put right, a sentence each."""
        sentences = []
        if self.unreadable:
            sentences.append(
                f"Samples that cannot be read: {len(self.unreadable):,}; replace or remove them, or train with "
                "loader.on_error=skip"
            )
        if self.shared:
            sentences.append(f"Pictures in more than one set: {len(self.shared):,}; remove them from one")
        if self.contradicting:
            sentences.append(f"Pictures under more than one label: {len(self.contradicting):,}; correct the labels")
        empty = [label for label, counts in self.classes() if self.parts[:1] == ["train"] and not counts[0]]
        if empty:
            sentences.append(f"Labels that are not in the training set: {len(empty):,}, such as {empty[0]}")
        return sentences
