"""Checks, while a run is built, its settings, the first samples and all labels of its datasets, and its sampler.

In this order: `check_settings`, before anything is read; `first_batches` and `check_labels`, when the datasets are
built; `check_processes`, which compares these datasets between processes; and `check_sampler`. `check_dataset` is for
the tests of your own dataset.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from data import optional
from data.errors import DataError, explained
from data.subset import Subset
from loaders import Random, WorkerLoader, move, offers, tensors
from training.config import Config, ConfigError, flat
from training.processes import Processes
from training.tasks import Batch, Multilabel, Task

log = logging.getLogger(__name__)

RANDOM_COLLATE = (
    "data.collate gives other batches for the same samples, and it makes those of the test set too: what it draws "
    "there changes the score. Augment in data.transform, or in the section augment, which is for training alone"
)
NOT_REPEATABLE = (
    "%s gives other samples when the first ones are read again with the same random numbers, so runs and resumes "
    "differ: it depends on a counter, the time, or a generator made while a sample is read, such as default_rng() "
    "without a seed; draw from the global generators (docs/data.md)"
)
RANDOM_TEST = (
    "%s gives other test samples with other random numbers, so the scores of equal weights differ from one evaluation "
    "to the next: augment for train=True alone, and let what is drawn for a test sample depend on its index"
)
NOT_REPEATABLE_ORDER = (
    "%s gives other indices when it is read again with the same random numbers, so a resume repeats some samples and "
    "leaves others out: it depends on the time, or on a generator made in __iter__, such as default_rng() without a "
    "seed; draw from the global generators, which are seeded for each epoch (docs/extending.md)"
)
FIRST_INDICES = 1000  # indices of a sampler, or in the batches of a batch sampler, that are compared
COMPARED = ("seed", "train", "optim", "schedule", "augment", "task")  # what check_settings compares
OWN_SETTINGS = ("train.resume", "train.init_from", "train.num_threads")  # of each process: of its machine
MOST_AS_TEXT = 10**7  # above this many numbers, as masks have, their text would take 15 times their memory


def check_settings(processes: Processes, config: Config) -> None:
    """Raises ConfigError in all processes if settings that decide what is trained differ between them.

    Those of data, model, trainer, loader and callbacks may: folders and numbers of cores are other ones on another
    machine. check_sampler compares what samplers give.
    """
    sections = asdict(config)
    settings = flat({key: sections[key] for key in COMPARED})
    first, *others = processes.gather({key: str(value) for key, value in settings.items()})
    for key, value in first.items():
        if different := [other[key] for other in others if other.get(key) != value and key not in OWN_SETTINGS]:
            raise ConfigError(
                f"{key} is {value} in the first process, and {different[0]} in another: all train one network, on "
                "parts of one order, so give them the same"
            )


def first_batches(
    datasets: list[Any], task: Task, collate: Callable | None, config: Config
) -> list[tuple[Batch, bool]]:
    """The first batches of the training and the test set, and whether they are the same when they are read again.

    If a worker reads them, this process opens no files.
    """
    workers = 1 if config.loader.num_workers != 0 or any(map(is_stream, datasets)) else 0
    read = partial(read_first, collate=collate, skips=config.loader.on_error == "skip")
    sets = [*zip(datasets, (False, True), strict=True)]
    with WorkerLoader(
        sets,
        None,
        num_workers=workers,
        collate_fn=read,
        timeout=config.loader.timeout,
        multiprocessing_context=config.loader.start_method,
        seed=config.seed,
    ) as loader:
        read_batches: Any = list(loader)
    for warning in {warning: None for *_, warnings in read_batches for warning in warnings}:
        log.warning(warning)
    checked = []
    for (batch, doubled, warnings), dataset in zip(read_batches, datasets, strict=True):
        checked.append((check_batch(batch, doubled, dataset, task), all(warnings.values())))
    return checked


def read_first(
    item: tuple[Any, bool], collate: Callable | None, skips: bool = False
) -> tuple[Any, Any, dict[str, bool]]:
    """Reads the first two samples, or the only one. item: a dataset, and whether it is the test set. Returns

    - a batch of them;
    - the lengths of the tensors in a batch of these samples twice (`lengths_of`);
    - warnings, each with whether processes can compare these samples nevertheless.
    """
    dataset, is_test = item
    name = type(dataset).__name__
    if not (is_stream(dataset) or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))):
        raise DataError(f"{name} needs __len__ and __getitem__, or has to be an IterableDataset")
    # First: a generator that is made when it is needed, and kept, is seeded from then on.
    warnings = {} if is_stream(dataset) else unrepeatable(dataset, is_test, collate)
    samples = list(islice(dataset if is_stream(dataset) else readable(dataset, skips), 2))
    if not samples:
        unread = f"{name}: none of the first samples can be read"
        if not is_stream(dataset) and len(dataset):
            with explained(unread, "loader.on_error=raise tells where it fails"):
                dataset[0]
        raise DataError(f"{name} has no samples: check the files that it reads")
    if collate is not None:
        copies: list[Any] = []
        with suppress(Exception):  # of samples that cannot be copied
            copies = [deepcopy(samples) for _ in range(3)]  # collate may change them
        batch = collate(samples)
        if not copies:
            return batch, lengths_of(batch), warnings
        if not are_equal_batches(batch, collate(copies[0])):
            warnings = {RANDOM_COLLATE: False}
        return batch, lengths_of(collate(copies[1] + copies[2])), warnings
    remedy = (
        "return tensors, arrays or numbers from __getitem__, the same fields for each sample, end data.transform with "
        "a crop or a resize to one size, or set data.collate"
    )
    with explained(
        f"{name}: two samples cannot make a batch", remedy, (KeyError, TypeError, ValueError, RuntimeError)
    ):
        return default_collate(samples), lengths_of(default_collate([*samples, *samples])), warnings


def unrepeatable(dataset: Any, is_test: bool, collate: Callable | None) -> dict[str, bool]:
    """A warning if the first two samples are others when they are read again, with whether they can be compared.

    They are read with the same random numbers; those of a test set with other ones, too. If reading fails, returns {}:
    `read_first` says so.
    """

    def make_batch(samples: list[Any]) -> Any:
        return (collate or default_collate)(deepcopy(samples))  # the dataset may hold those that collate changes

    batches = []
    with suppress(Exception):
        count = min(2, len(dataset))
        for seed in (0, 0, 1) if is_test else (0, 0):
            with WorkerLoader(dataset, count, sampler=range(count), seed=seed, collate_fn=make_batch) as loader:
                batches += list(loader)
        name = type(dataset).__name__ + (" or data.collate" if collate else "")
        if not are_equal_batches(*batches[:2]):
            return {NOT_REPEATABLE % name: False}
        if not are_equal_batches(batches[0], batches[-1]):
            return {RANDOM_TEST % name: True}
    return {}


def are_equal_batches(batch: Any, other: Any) -> bool:
    """Whether all tensors of two batches are equal."""
    return not any(differ(ours, theirs) for ours, theirs in zip(tensors(batch), tensors(other), strict=False))


def differ(ours: Any, theirs: Any) -> bool:
    """Whether two values are not equal. In tensors NaN equals NaN. Those that cannot be compared count as equal."""
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        return isinstance(ours, Tensor) or isinstance(theirs, Tensor) or bool(ours != theirs)
    with suppress(NotImplementedError, RuntimeError):  # as nested ones
        return ours.shape != theirs.shape or bool(((ours != theirs) & ~(ours.isnan() & theirs.isnan())).any())
    return False


def readable(dataset: Any, skips: bool) -> Iterator[Any]:
    """The first samples; if `skips`, without those that raise an error."""
    for index in range(min(len(dataset), 100)):
        with suppress(*([Exception] if skips else [])):
            yield dataset[index]


def lengths_of(batch: Any) -> Any:
    """The batch with tensors that are as long, but have no other dimensions."""

    def rows_alone(part: Any) -> Any:  # a mapping with a method `to`, as tokenizers return, is moved as a whole
        if isinstance(part, Tensor):
            return torch.empty(part.shape[:1])
        return {name: lengths_of(value) for name, value in part.items()} if isinstance(part, Mapping) else part

    return move(batch, rows_alone)


def check_batch(batch: Any, doubled: Any, dataset: Any, task: Task) -> Batch:
    """Names the fields of a batch of one or two samples. Raises DataError if one is missing, or a label is wrong.

    doubled: a batch of these samples twice: see Task.learn_layout.
    """
    batch = task.to_dict(batch)
    name = type(dataset).__name__
    fits = optional(dataset, "fits_task")
    names = {kind.__name__.lower() for kind in type(task).__mro__}
    is_ours = names & {"classification", "multilabel", "regression"}
    if is_ours and fits is not None and fits not in names:
        raise DataError(f"{name}: the labels fit task={fits}: choose it, or another data.label (or data.numbers=true)")
    for field in task.fields:
        if field not in batch:
            raise DataError(f"{name} has no {field!r}, only {', '.join(batch)}: change task.inputs or task.label")
    task.learn_layout(batch, task.to_dict(doubled))
    labels = batch[task.label] if task.label else None
    below = task.label_below
    if below and (not isinstance(labels, Tensor) or wrong_label(labels, below, task.ignored) is not None):
        raise DataError(f"{name} has the labels {labels}: give the numbers of classes, integers from 0 to {below - 1}")
    check_multilabel(name, labels, task)
    return batch


def check_multilabel(name: str, labels: Any, task: Task) -> None:
    """Raises DataError for a label of task=multilabel that is not in 0 to 1, unless `scored_mask` leaves it out."""
    if not isinstance(task, Multilabel) or not isinstance(labels, Tensor):
        return
    is_wrong = task.is_wrong(labels) & task.label_mask(labels)
    if is_wrong.any():
        raise DataError(
            f"{name} has the label {labels[is_wrong][0].item()}: give 1 for a class that the sample has, and 0 for "
            "others; if it means that this is not known, let scored_mask of a task of yours leave it out"
        )


def check_labels(dataset: Any, task: Task, first: Batch | None = None) -> None:
    """Raises DataError if the dataset offers `labels`, and one of them is no class number.

    Warns if they differ from those of its first samples. first: a batch of these; None: they are not known.
    """
    labels = optional(dataset, "labels")
    below = task.label_below
    if labels is None or is_stream(dataset):
        return
    values = np.asarray(labels)
    if values.dtype.kind in "iuf" and isinstance(task, Multilabel) and values.shape[1:] == (task.num_outputs,):
        check_multilabel(f"labels of {type(dataset).__name__}", torch.from_numpy(values.astype(np.float32)), task)
    if values.dtype.kind in "iu" and below is not None:
        numbers = torch.from_numpy(values.astype(np.int64))
        row = wrong_label(numbers, below, task.ignored)
        if row is not None:
            label = f"labels[{row}] of {type(dataset).__name__} is {values[row]}"
            raise DataError(f"{label}: give the numbers of classes, integers from 0 to {below - 1}")
        read = first[task.label].flatten() if first else numbers.flatten()
        offered = numbers.flatten()[: len(read)]
        if not read.is_floating_point() and not torch.equal(read.long(), offered):
            log.warning(
                "`labels` of %s begins with %s, but its first samples have %s: class weights, splits and samplers go "
                "by `labels`, so make them equal",
                type(dataset).__name__,
                offered.tolist(),
                read.tolist(),
            )


def warn_of_one_set(datasets: list[Any], first: Batch, first_tested: Batch) -> None:
    """Warns if the test set seems to be the training set: it has as many samples, and the first ones are equal."""
    if any(map(is_stream, datasets)) or len({*map(len, datasets)}) > 1:
        return
    are_tensors = all(isinstance(value, Tensor) for value in first.values())
    if are_tensors and are_equal_batches(first, first_tested):
        log.warning(
            "%s has as many test samples as training samples, and the first ones are equal: if all are, scores are of "
            "samples that are trained on; read others if `train` is false, or none, with data.val_fraction=0.1",
            type(datasets[0]).__name__,
        )


def wrong_label(labels: Tensor, below: int, ignored: int | None) -> int | None:
    """The row of the first label that is no class; None if there is none.

    Labels are a number from 0 to below `below`, or `ignored`, for each sample: (N,) or (N, 1); or shares of the
    classes, (N, below). Raises DataError for another shape.
    """
    are_shares = labels.is_floating_point() and labels.shape[1:] == (below,)
    if labels.numel() != len(labels) and not are_shares:
        form = f"{str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape[1:])}"
        has_all = labels.shape[1:] == (below,)
        other = "choose task=multilabel" if has_all else "write a task for these labels (docs/extending.md)"
        raise DataError(
            f"a label is {form}, but the task takes a class for each sample, 0 to {below - 1}, "
            f"or {below} floats: return one of them, or {other}"
        )
    if labels.is_floating_point():
        return None if are_shares else 0
    numbers = labels.long().flatten()
    wrong = (numbers < 0) | (numbers >= below)
    if ignored is not None:
        wrong &= numbers != ignored
    return int(wrong.nonzero()[0]) if wrong.any() else None


def check_processes(processes: Processes, name: str, dataset: Any, first: Any, is_repeatable: bool) -> None:
    """Raises DataError in all processes if their datasets differ: they share one by index.

    It compares what a run takes of them (`facts_of`), and the first samples, if they are the same when they are read
    again.
    """
    if processes.world_size == 1:
        return
    remedy = (
        "each process has to find the same files, in the same order: sort them, and do not rely on the order of a set"
    )
    lengths = processes.gather(None if is_stream(dataset) else len(dataset))
    if len({*lengths}) > 1:
        raise DataError(f"the {name} sets of the processes have different lengths, {lengths}: {remedy}")
    facts, *others = processes.gather(facts_of(dataset))
    different = [key for key, fact in facts.items() if not all(is_same(fact, other[key]) for other in others)]
    if different:
        raise DataError(f"the {name} sets of the processes differ in {', '.join(different)}: {remedy}")
    if is_stream(dataset):
        return
    of_processes = processes.gather(sample_means(first))
    are_alike = all(are_close(of_processes[0], other) for other in of_processes)
    if all(processes.gather(is_repeatable)) and not are_alike:
        raise DataError(f"the processes have the {name} samples in different orders, the first differ: {remedy}")


def facts_of(dataset: Any) -> dict[str, int | list[float]]:
    """What a run takes from a dataset, by name: numbers, or checksums, that all processes have to share.

    Not those of single samples of a stream, of which each process may have others.
    """
    facts: dict[str, int | list[float]] = {name: [*(optional(dataset, name) or ())] for name in ("mean", "std")}
    for name in ("classes", "fits_task") if is_stream(dataset) else ("classes", "fits_task", "labels", "val_groups"):
        facts[name] = checksum(optional(dataset, name))
    if isinstance(dataset, Subset):
        facts["the samples that validate"] = checksum(dataset.indices)
    return facts


def checksum(value: Any) -> int:
    """A checksum of a value, or of an array of them."""
    array = np.asarray(() if value is None else value)
    if array.ndim > 1 and array.dtype.kind in "biuf" and array.size > MOST_AS_TEXT:
        return crc32(np.ascontiguousarray(array).data)
    values = array.tolist()  # as checkpoints have it since the first version
    if array.dtype == object:  # a set has another order in each process
        values = [sorted(map(repr, value)) if isinstance(value, set | frozenset) else value for value in values]
    return crc32(str(values).encode())


def is_same(ours: int | list[float], theirs: Any) -> bool:
    return are_close(ours, theirs) if isinstance(ours, list) else ours == theirs


def are_close(ours: Any, theirs: Any, relative: float = 1e-3, absolute: float = 1e-3) -> bool:
    """Whether two tensors, or lists of numbers, are equal but for how machines round. NaN equals NaN."""
    one, other = (torch.as_tensor(value, device="cpu").double() for value in (ours, theirs))  # mps has no float64
    return one.shape == other.shape and torch.allclose(one, other, relative, absolute, equal_nan=True)


def sample_means(batch: Any) -> list[float]:
    """The mean of each sample in each tensor of the batch."""
    means = [tensor.double().reshape(len(tensor), -1).mean(1) for tensor in tensors(batch) if tensor.dim()]
    return torch.cat(means).nan_to_num().tolist() if means else []


def check_sampler(order: dict[str, Any], dataset: Any, seed: int, processes: Processes) -> int | None:
    """A checksum of the first indices that the `sampler` or `batch_sampler` of an order gives.

    None if there is neither, or it cannot be copied; and if it gives other ones when it is read again, which is warned
    of. Raises ConfigError in all processes if they have samplers of other indices.
    """
    samplers: dict[str, Any] = {key: order[key] for key in ("sampler", "batch_sampler") if key in order}
    if not samplers:
        return None
    name = ", ".join(type(sampler).__name__ for sampler in samplers.values())
    first, again = (first_indices(samplers, dataset, seed) for _ in range(2))
    if first != again:
        log.warning(NOT_REPEATABLE_ORDER, name)
    of_processes = processes.gather(first if "sampler" in samplers else None)
    if any(indices != of_processes[0] for indices in of_processes):
        raise ConfigError(
            f"{name} gives other indices in each process, and each trains its share of them, so samples would be "
            "repeated and left out: draw from the global generators, which are seeded alike, and do not rely on the "
            "order of a set; or give the batches of each process by a batch_sampler"
        )
    return None if first is None or first != again else crc32(str(first).encode())


def first_indices(samplers: dict[str, Any], dataset: Any, seed: int) -> list[Any] | None:
    """The first indices, or batches of them, in epoch 0. None if the samplers cannot be copied, or give no integers.

    Copies are read, as reading may change a sampler. They share the dataset, and what is in its attributes.
    """
    shared = {id(part): part for part in (dataset, *getattr(dataset, "__dict__", {}).values())}
    with suppress(Exception):
        settings = {"batch_size": None, **deepcopy(samplers, shared)}
        if "batch_sampler" in settings:
            del settings["batch_size"]
        indices = range(sys.maxsize)
        with WorkerLoader(indices, seed=seed, collate_fn=lambda read: read, **settings) as loader:
            read: list[Any] = []
            count = 0
            for item in loader:
                read.append(item)
                count += len(item) if "batch_sampler" in settings else 1
                if count >= FIRST_INDICES:
                    break
            return read
    return None


def checksum_of_labels(dataset: Any) -> int:
    return checksum(optional(dataset, "labels"))


def check_dataset(dataset: Any, task: Task, collate: Callable | None = None) -> Batch:
    """Checks that training can use the dataset, and returns a batch of its first two samples, or of its only one.

    A test of a dataset: check_dataset(Moons(train=False), Classification(Moons(train=True), inputs="point")), see
    docs/data.md. Raises DataError.
    Its `read_batch`, if it has one, must write what `__getitem__` returns, so give it one without random augmentation.
    """
    first, doubled, _ = read_first((dataset, False), collate)
    batch = check_batch(first, doubled, dataset, task)
    if task.label:
        task.cast_labels(batch[task.label])
    if collate is None and offers(dataset, "read_batch"):
        indices = np.arange(min(2, len(dataset)))
        spec = dataset.sample_spec()
        out = {name: torch.full((len(indices), *shape), 77, dtype=dtype) for name, (shape, dtype) in spec.items()}
        dataset.read_batch(indices, dict(out), Random(0, 0, indices, indices))
        for name, written in out.items():
            read = batch[name]
            if read.dtype != written.dtype or not are_close(read, written, 1e-4, 1e-4):
                raise DataError(f"read_batch or sample_spec has another {name!r} than __getitem__ returns")
    return batch


def is_stream(dataset: Any) -> bool:
    """Whether the dataset is iterated, as torch decides it, and so has no order or length that a loader can use."""
    return isinstance(dataset, IterableDataset)
