"""data.cache: never a wrong image, whatever happens to the cache and to the files."""

import os
import pickle
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.image_folder import ImageFolder
from data.images.cache import END, RECORD
from loaders import WorkerLoader
from tests.configs import differing_weights, stop, train
from tests.data.contract import TransformedDataset, mirrored
from tests.data.fakes import noise
from tests.data.reading import paths, refused
from training.stopping import Stopped

ROOT = Path(__file__).resolve().parents[3]
COUNT = 12  # training images


def write_noise(path, seed, size=(60, 45)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(*size[::-1], 3, seed=seed)).save(path)


@pytest.fixture
def images(tmp_path):
    for split, count in (("train", COUNT), ("val", 4)):
        for number in range(count):
            write_noise(tmp_path / "images" / split / "ab"[number % 2] / f"{number:02}.png", number)
    return tmp_path / "images"


@pytest.fixture(params=["ram", "disk"])
def make(images, tmp_path, request):
    arguments = {"image_size": 16, "cache_side": 30, "cache_dir": str(tmp_path / "cache")}
    return partial(ImageFolder, root=images, cache=request.param, **arguments)


def stored(dataset):
    """The samples that the cache has."""
    return [
        row
        for row, path in enumerate(paths(dataset))
        if dataset._pixel_cache.read(row, path, os.stat(path)) is not None
    ]


def everything(dataset):
    return torch.stack([dataset.whole(index) for index in range(len(dataset))])


@pytest.fixture
def uncached(make, tmp_path):
    """The same images, of which none is stored."""
    return partial(make, cache_gb=0, cache_dir=str(tmp_path / "none"))(True)


class TestCached(TransformedDataset):
    yaml = ROOT / "conf" / "data" / "image_folder.yaml"

    @pytest.fixture
    def make(self, make):
        return make


def test_an_image_is_the_same_when_it_is_first_read_and_later(make):
    dataset = make(True)
    first = everything(dataset)
    assert first.shape == (COUNT, 3, 30, 40) and stored(dataset) == [*range(COUNT)]
    assert torch.equal(everything(dataset), first)
    assert torch.equal(everything(pickle.loads(pickle.dumps(dataset))), first)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        sample = dataset[-1]
        torch.manual_seed(1)
        assert torch.equal(dataset[COUNT - 1]["image"], sample["image"])


def test_a_new_image_is_prepared_as_the_test_sample_of_its_file_is(make):
    for options in ({}, {"test_transform": mirrored}):
        dataset = make(False, **options)
        pixels = np.asarray(Image.open(dataset.path(1)))
        assert torch.equal(dataset.prepare(pixels), dataset[1]["image"])


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """calls(owner, name, data_at): how often the function was called, in any process, with 1,000 bytes or more."""

    def count(owner, name, data_at):
        function = getattr(owner, name)
        log = tmp_path / name
        log.touch()

        def counted(*arguments):
            if isinstance(arguments[data_at], bytes | memoryview) and len(arguments[data_at]) > 1000:
                with log.open("a") as file:
                    file.write("x")
            return function(*arguments)

        monkeypatch.setattr(owner, name, counted)
        return lambda: log.stat().st_size

    return count


def test_a_file_is_decoded_once_for_all_workers_and_epochs(make, calls):
    decoded = calls(ImageFolder, "decoded", data_at=1)
    with WorkerLoader(make(True), 3, seed=0, num_workers=2) as loader:
        for _ in range(3):
            list(loader)
    assert decoded() == COUNT


def test_an_image_that_two_processes_decode_at_once_is_stored_by_the_first(make):
    dataset = make(True)
    other = pickle.loads(pickle.dumps(dataset))
    path = dataset.path(0)

    def slow_pixels(data, path):
        everything(other)
        return dataset._pixels(data, path)

    dataset._pixel_cache.image(0, path, slow_pixels)
    assert stored(dataset) == [*range(COUNT)]
    (end,) = END.unpack(os.pread(dataset._pixel_cache._fd, END.size, 0))
    assert end == END.size + COUNT * (RECORD.size + 30 * 40 * 3)


def test_an_image_is_verified_once_for_all_workers_and_epochs(make, calls):
    dataset = make(True)
    everything(dataset)
    verified = calls(zlib, "crc32", data_at=0)
    for images in (dataset, make(True)):  # the first has stored them itself
        with WorkerLoader(images, 3, shuffle=True, seed=0, num_workers=2) as loader:
            for _ in range(3):
                list(loader)
    assert verified() == COUNT


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 2},
        {"num_workers": 0},
        {"num_workers": 2, "worker_method": "thread"},
        pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 1, "multiprocessing_context": "forkserver"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_batches_are_the_same_in_every_epoch_with_every_kind_of_worker(make, uncached, how):
    dataset = make(True)
    with WorkerLoader(uncached, 4, shuffle=True, seed=3, num_workers=0) as loader:
        epochs = [[batch["image"].clone() for batch in loader] for _ in range(2)]
    with WorkerLoader(dataset, 4, shuffle=True, seed=3, **how) as loader:
        for epoch in epochs:
            for batch, other in zip(loader, epoch, strict=True):
                assert torch.equal(batch["image"], other)
    assert stored(dataset) == [*range(COUNT)], "the workers wrote into the memory of this process"


def test_processes_that_start_apart_share_one_cache_while_one_has_it(make):
    first = make(True)
    second = make(True)
    everything(first)
    assert stored(second) == stored(pickle.loads(pickle.dumps(first))) == [*range(COUNT)]


def test_only_a_disk_keeps_it_for_later_runs(make):
    everything(make(True))
    kind = make.keywords["cache"]
    assert stored(make(True)) == ([] if kind == "ram" else [*range(COUNT)])
    assert stored(partial(make, cache_side=20)(True)) == [], "other sizes are another cache"


@pytest.mark.parametrize("change", ["content", "content, with the time of before", "size"])
def test_a_changed_file_is_read_again(make, uncached, change):
    dataset = make(True)
    before = everything(dataset)
    path = Path(dataset.path(4))
    stat = path.stat()
    other = path.read_bytes()
    write_noise(path, 99, (80, 60) if change == "size" else (60, 45))
    assert path.read_bytes() != other
    if "time" in change:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for _ in range(2):
        after = everything(dataset)
        assert [*(after != before).flatten(1).any(1).nonzero().flatten()] == [4]
        assert torch.equal(after[4], everything(uncached)[4])
    assert stored(dataset) == [*range(COUNT)]


def test_what_does_not_fit_is_read_from_its_file_which_is_said_once(make, uncached, caplog):
    size = 30 * 40 * 3
    dataset = partial(make, cache_gb=3.5 * size / 1e9)(True)
    expected = everything(uncached)
    for _ in range(2):
        assert torch.equal(everything(dataset), expected)
    assert stored(dataset) == [0, 1, 2]
    assert caplog.text.count("data.cache: data.cache_gb") == 1


def test_a_full_disk_is_said_once_and_images_are_right(make, uncached, caplog, monkeypatch):
    dataset = make(True)
    pwrite = os.pwrite
    calls = []

    def full(fd, data, offset):
        if len(data) > 1000:
            calls.append(offset)
            if len(calls) % 2 == 0:
                raise OSError(28, "No space left on device")
            return pwrite(fd, data[:1000], offset)  # a part
        return pwrite(fd, data, offset)

    expected = everything(uncached)
    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        assert torch.equal(everything(dataset), expected)
    assert stored(dataset) == []
    assert len(calls) == 2 and caplog.text.count("No space left on device: nothing more is stored") == 1


@pytest.mark.parametrize("at", ["pixels", "record"])
def test_an_interrupted_or_killed_writer_leaves_nothing_that_is_used(make, uncached, monkeypatch, at):
    dataset = make(True)
    expected = everything(uncached)
    pwrite = os.pwrite

    def interrupted(fd, data, offset):
        if (len(data) > 1000) == (at == "pixels") and len(data) != END.size:
            pwrite(fd, data[: len(data) // 2], offset)
            raise KeyboardInterrupt
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", interrupted)
        for index in range(3):
            with pytest.raises(KeyboardInterrupt):
                dataset.whole(index)
    assert stored(dataset) == []
    for _ in range(2):
        assert torch.equal(everything(dataset), expected)


def test_a_write_in_parts_stores_the_whole_image(make, monkeypatch):
    dataset = make(True)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    everything(dataset)
    assert stored(make(True)) == [*range(COUNT)]


def test_pixels_that_were_damaged_in_the_cache_are_not_used(make, images):
    dataset = make(True)
    expected = everything(dataset)
    other = make(True)
    cache = dataset._pixel_cache
    offset, *_ = RECORD.unpack_from(cache._map, END.size + 5 * RECORD.size)
    os.pwrite(cache._fd, b"\x00" * 50, offset + 1000)
    assert 5 not in stored(other)
    assert torch.equal(everything(other), expected)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped_with_and_without_what_was_stored(images, tmp_path):
    cached = (
        f"data=image_folder data.root={images} data.image_size=16 data.cache_side=30 train.batch_size=4 "
        f"data.cache=disk data.cache_dir={tmp_path / 'cache'} loader=workers"
    )
    train(tmp_path / "whole", cached, "loader.num_workers=2")
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", cached, *stop(4), "loader.num_workers=1")
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    train(tmp_path / "stopped", cached)
    assert differing_weights(tmp_path / "stopped", tmp_path / "whole") == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cache": "yes"}, "data.cache=yes"),
        ({"cache_side": 0}, "data.cache_side=0"),
        ({"cache_dir": "/proc/none"}, "data.cache=disk: /proc/none .*data.cache_dir"),
    ],
)
def test_a_setting_that_cannot_be_used_is_a_sentence(images, arguments, words):
    with refused(words):
        ImageFolder(True, images, **{"cache": "disk", **arguments})
