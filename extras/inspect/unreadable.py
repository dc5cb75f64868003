"""Lists the samples that a run could not read, with their files, in unreadable.tsv."""

import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from data import optional
from data.errors import printable
from training.files import write_whole
from training.run import Run

log = logging.getLogger(__name__)


class Sample(NamedTuple):
    part: str  # the set: train, val or test
    number: str  # its index in the set
    path: str  # "" if the dataset has no path(index)
    error: str


class UnreadableSamples:
    """Writes a line per sample when the run ends, below a header: set, index, path and error, with tabs between them.

    Its `skipped_files` in summary.json is how many samples `loader.on_error=skip` left out, each counted once. A run
    that another error or a signal ends lists those of its main process.
    """

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        ours = list(unreadable(run))
        found = [ours] if summary is None else run.processes.gather(ours)
        firsts = {sample[:2]: (sample, can_skip) for process in found for sample, can_skip in process}
        samples = dict(firsts.values())
        if summary is not None:
            summary["skipped_files"] = len(samples)
        for sample, can_skip in samples.items():
            if not can_skip or run.config.loader.on_error == "raise":
                remedy = ": loader.on_error=skip leaves it out" if can_skip else ""
                name = sample.path or "not known, as it has no path(index)"
                log.error(
                    "sample %s of the %s set could not be read%s; its file: %s",
                    sample.number,
                    sample.part,
                    remedy,
                    name,
                )
        if samples and run.is_main:
            path = run.folder / "unreadable.tsv"
            lines = [("set", "index", "path", "error"), *samples]
            write_whole(path, "".join("\t".join(line) + "\n" for line in lines))
            log.warning("samples that could not be read: %d; %s lists them", len(samples), path)


def unreadable(run: Run) -> Iterator[tuple[Sample, bool]]:
    """The samples that this process could not read, each once, and whether loader.on_error=skip would leave it out.

    It leaves out those that raise, and not those at which workers died.
    """
    for part, loader in run.loaders.items():
        path = optional(loader.dataset, "path")
        workers = loader.loader_stats.workers
        for notes, can_skip in ((workers.skipped, True), (workers.deadly, False)) if workers else ():
            for index, reason in notes:
                is_of_stream = isinstance(index, str)
                name = "" if path is None or is_of_stream else os.fsdecode(path(index))
                yield Sample(part, str(index), printable(name), " ".join(reason.split())), can_skip
