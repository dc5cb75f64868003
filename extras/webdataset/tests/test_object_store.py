"""data=webdataset over a real S3 server and a web server, behind a proxy that delays answers and spoils some."""

import gzip
import io
import itertools
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import traceback
from contextlib import ExitStack

import numpy as np
import pytest
from PIL import Image

from data.errors import DataError
from data.subset import Subset
from extras.webdataset import index_tars, object_store, tar_index
from extras.webdataset.tests.object_server import Faults, serve_folder, serve_through
from extras.webdataset.tests.shards import write_tar
from extras.webdataset.webdataset import WebDataset, WebDatasetStream
from loaders import WorkerLoader

pytest.importorskip("obstore", reason="needs the package obstore")
SHARDS, IMAGES = 3, 40  # of each shard
NAMES = f"train-{{0..{SHARDS - 1}}}.tar"
SECRET = "sesame"
BUCKETS = itertools.count()


@pytest.fixture(autouse=True)
def as_in_a_new_process(tmp_path, monkeypatch):
    """The user's cache is empty, and no credentials are set. A test uses obstore only in processes that it forks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    yield
    assert object_store._user is None


def forked(function):
    """What the function returns or raises in a forked process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run():
        try:
            sender.send((function(), None))
        except Exception as error:
            sender.send((None, error))

    process = context.Process(target=run)
    process.start()
    sender.close()
    result, error = receiver.recv()
    process.join()
    if error is not None:
        raise error
    return result


@pytest.fixture(scope="module")
def images():
    """The files of images that all differ."""
    rng, files = np.random.default_rng(0), []
    for number in range(SHARDS * IMAGES):
        file = io.BytesIO()
        Image.fromarray(rng.integers(256, size=(24 + number % 7, 32, 3), dtype=np.uint8)).save(file, "jpeg")
        files.append(file.getvalue())
    return files


@pytest.fixture
def folder(tmp_path, images):
    """train-0.tar, ...: what the servers have."""
    for shard in range(SHARDS):
        files = {}
        for number in range(shard * IMAGES, (shard + 1) * IMAGES):
            files |= {f"{number:03}.jpg": images[number], f"{number:03}.cls": b"%d" % (number % 5)}
        write_tar(tmp_path / "served" / f"train-{shard}.tar", files)
    return tmp_path / "served"


@pytest.fixture(scope="module")
def s3():
    """The address of an S3 server."""
    moto = pytest.importorskip("moto.server", reason="needs the package moto[server]")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def enter():
    """Enters context managers; they are left when the test ends."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def web(folder, enter):
    """The address of a web server of `folder`, through a proxy with `faults`."""
    upstream = enter(serve_folder(folder)).url
    return lambda faults: enter(serve_through(upstream, faults)).url


@pytest.fixture
def bucket(s3, folder, enter, monkeypatch):
    """The address of a bucket with the files of `folder`, through a proxy with `faults`."""
    import boto3

    for name, value in {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1")
    name = f"bucket-{next(BUCKETS)}"
    client.create_bucket(Bucket=name)
    for path in folder.iterdir():
        client.upload_file(str(path), name, path.name)

    def start(faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", enter(serve_through(s3, faults)).url)
        return f"s3://{name}"

    return start


@pytest.fixture(params=["web", "bucket"])
def store(request):
    return request.getfixturevalue(request.param)


def read_batches(dataset, kill=None, **options):
    """All batches of two epochs. After each, `kill` is sent to a worker."""
    batches = []
    options = {"shuffle": True, "num_workers": 2, "persistent_workers": True, **options}
    with WorkerLoader(dataset, 8, seed=3, max_restarts=100, **options) as loader:
        for _ in range(2):
            for batch in loader:
                batches.append({name: value.numpy().copy() for name, value in batch.items()})
                if kill is not None:
                    os.kill(multiprocessing.active_children()[0].pid, kill)
    return batches


def assert_equal(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one["image"], other["image"]) and np.array_equal(one["label"], other["label"])


def test_batches_are_those_from_disk_whatever_requests_fail(store, folder, monkeypatch):
    monkeypatch.setattr(object_store, "STALL_SECONDS", 1)
    faults = Faults(0.03, refused=0.05, cut=0.02, stalled=0.01, seed=1)
    dataset = WebDataset(True, f"{store(faults)}/{NAMES}", image_size=16)
    assert_equal(read_batches(dataset), read_batches(WebDataset(True, f"{folder}/train-*.tar", image_size=16)))
    assert min(faults.spoilt[kind] for kind in ("refused", "cut", "stalled")) > 0
    assert faults.most > 4  # in flight at the same time


@pytest.mark.parametrize(
    "options", [{"kill": signal.SIGKILL}, {"worker_method": "thread"}, {"num_workers": 0, "persistent_workers": False}]
)
def test_batches_are_those_from_disk_in_any_kind_of_worker_that_may_be_killed(web, folder, options):
    dataset = WebDataset(True, f"{web(Faults())}/{NAMES}", image_size=16)
    expected = read_batches(WebDataset(True, f"{folder}/train-*.tar", image_size=16), num_workers=1)
    assert_equal(forked(lambda: read_batches(dataset, **options)), expected)


def test_a_process_whose_parent_read_from_the_store_says_so_instead_of_waiting_for_ever(web):
    dataset = WebDataset(True, f"{web(Faults())}/{NAMES}", image_size=16)

    def read():
        dataset[0]
        read_batches(dataset)

    with pytest.raises(DataError, match=r"was forked from one that had read .*multiprocessing_context='spawn'"):
        forked(read)


def test_a_stream_reads_each_byte_once_whatever_requests_fail_and_workers_die(store, folder, monkeypatch):
    monkeypatch.setattr(tar_index, "BLOCK", 1 << 13)
    monkeypatch.setattr(object_store, "STALL_SECONDS", 1)
    faults = Faults(seed=1)
    keys, options = {"classes": list("01234"), "image_size": 16}, {"shuffle": False, "streams": 2}
    remote = WebDatasetStream(True, f"{store(faults)}/{NAMES}", **keys)
    expected = read_batches(WebDatasetStream(True, f"{folder}/train-*.tar", **keys), num_workers=1, **options)
    assert_equal(read_batches(remote, **options), expected)
    spans = [map(int, span.removeprefix("bytes=").split("-")) for method, _, span in faults.seen if method == "GET"]
    assert sum(last + 1 - first for first, last in spans) <= sum(path.stat().st_size for path in folder.iterdir())
    faults.shares = 0.05, 0.05, 0.02
    assert_equal(read_batches(remote, kill=signal.SIGKILL, **options), expected)
    assert min(faults.spoilt[kind] for kind in ("refused", "cut", "stalled")) > 0


def test_requests_that_wait_for_a_server_do_not_delay_the_end_of_a_program(python, bound):
    program = """
import threading
from extras.webdataset.object_store import answers
began = threading.Event()
waiting = answers([lambda: began.set() or threading.Event().wait()], 2)
assert began.wait(60)
"""
    python.run("-c", program, timeout=bound, check=True)


def test_the_files_of_the_next_batch_are_requested_before_this_one_is_complete(web, bound):
    faults, seen, next_one, waited = Faults(), set(), threading.Event(), []
    dataset = WebDataset(True, f"{web(faults)}/{NAMES}", image_size=16, attempts=1)

    def hold(*request):
        seen.add(request)
        if len(seen) == 8:  # the last file of the first batch
            waited.append(next_one.wait(bound))
        elif len(seen) == 9:
            next_one.set()

    faults.hold = hold
    subset = Subset(dataset, np.arange(len(dataset)))  # as a training set with data.val_fraction is
    with WorkerLoader(subset, 8, seed=0, num_workers=1, prefetch_factor=2) as loader:
        assert len(list(loader)) == SHARDS * IMAGES // 8
    assert waited == [True]


def test_an_index_is_in_the_cache_or_beside_the_shard_or_is_made(store, folder, tmp_path):
    faults = Faults()
    url = store(faults)

    def opened(cached=False):
        """Opens the shards. Returns how many bytes of what were read."""
        if not cached:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        faults.seen.clear()
        dataset = WebDataset(True, f"{url}/{NAMES}", image_size=16)
        assert dataset.labels.tolist() == [number % 5 for number in range(SHARDS * IMAGES)]
        assert dataset.path(41) == f"{url}/train-1.tar/041.jpg"
        found = {}
        for (method, path, span), count in faults.seen.items():
            first, last = map(int, re.findall(r"\d+", span or "0-0"))
            if method == "GET":
                found[path.rpartition("/")[2]] = found.get(path.rpartition("/")[2], 0) + count * (last - first + 1)
        return found

    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    whole = opened()
    assert {name: whole[name] for name in sizes} == sizes  # each was read once
    assert opened(cached=True) == {}
    index_tars.main([f"{url}/{NAMES}"])
    assert opened().keys() == {f"{name}.index.npz" for name in sizes}


def test_a_tar_that_changes_is_an_error_and_never_another_image(store, folder):
    url = store(Faults())
    dataset = WebDataset(True, f"{url}/{NAMES}", image_size=16)
    content = (folder / "train-1.tar").read_bytes().replace(b"\xff\xd8", b"\xff\xd9")
    forked(lambda: object_store.request("put", f"{url}/train-1.tar", content) and None)
    forked(lambda: dataset.encoded(5))
    for read in (lambda: dataset.encoded(45), lambda: list(dataset.encoded_rows(np.array([5, 45])))):
        with pytest.raises(DataError, match=rf"{url}/train-1.tar, bytes [\d,]+ to .*it has changed since its index"):
            forked(read)
    assert len(WebDataset(True, f"{url}/train-1.tar")) == IMAGES  # a new run makes a new index


def test_an_index_of_another_tar_is_refused(web, folder, tmp_path):
    url = web(Faults())
    index_tars.main([f"{url}/train-0.tar"])
    shutil.rmtree(tmp_path / "cache")
    (folder / "train-0.tar.index.npz").rename(folder / "train-1.tar.index.npz")
    with pytest.raises(DataError, match=r"1.tar.index.npz is the index of another tar, .*webdataset/index_tars.py"):
        WebDataset(True, f"{url}/train-1.tar")
    index_tars.main([f"{url}/train-1.tar"])
    assert len(WebDataset(True, f"{url}/train-1.tar")) == IMAGES


def test_a_range_that_fails_or_lacks_bytes_is_requested_again_and_then_an_error(web):
    faults = Faults()
    dataset = WebDataset(True, f"{web(faults)}/{NAMES}", image_size=16, attempts=2)
    whole = forked(lambda: dataset.encoded(0))
    faults.short = 1
    assert forked(lambda: dataset.encoded(0)) == whole and faults.short == 0
    faults.short = 2
    with pytest.raises(DataError, match=r"train-0.tar, bytes .* cannot be read \(the server sent [\d,]+ bytes\)"):
        forked(lambda: dataset.encoded(0))
    faults.seen.clear()
    faults.shares = (1.0, 0, 0)
    with pytest.raises(DataError, match=r"train-0.tar, bytes 512 to .* cannot be read \(.*503.*\); check the network"):
        forked(lambda: dataset[0])
    assert sum(faults.seen.values()) == 2


def test_credentials_are_in_no_error_and_not_in_the_dataset(bucket):
    dataset = WebDataset(True, f"{bucket(Faults())}/{NAMES}", image_size=16)
    assert SECRET.encode() not in pickle.dumps(dataset)
    with pytest.raises(DataError, match=r"s3://nowhere/a.tar is not there, or its bucket is not; check") as caught:
        WebDataset(True, "s3://nowhere/a.tar")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    for url in (f"https://host/a.tar?Signature={SECRET}", f"s3://me:{SECRET}@bucket/a.tar"):
        with pytest.raises(DataError, match="a password or a signature") as caught:
            WebDataset(True, url)
        assert SECRET not in str(caught.value)


def test_what_cannot_work_is_said_in_a_sentence(web, folder, monkeypatch):
    monkeypatch.setattr(object_store, "OPENING_SECONDS", 1)
    (folder / "compressed.tar").write_bytes(gzip.compress((folder / "train-0.tar").read_bytes()))
    url = web(Faults())
    for urls, words in (
        (f"{url}/none.tar", "none.tar is not there, or its bucket is not; check the name"),
        (f"{url}/secret.tar", "403 Forbidden: ); set credentials that allow it: AWS_ACCESS_KEY_ID"),
        (f"{url}/weak.tar", "weak.tar: the server sends no strong ETag"),
        (f"{url}/compressed.tar", "compressed.tar cannot be read as an uncompressed tar ("),
        (f"{url}/train-*.tar", "wildcards are for local files; write braces"),
        ("http://127.0.0.1:1/a.tar", "http://127.0.0.1:1/a.tar cannot be read ("),
        ("az://container/a.tar", "Account must be specified); set credentials: AWS_ACCESS_KEY_ID"),
    ):
        with pytest.raises(DataError, match=re.escape(words)):
            WebDataset(True, urls)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(DataError, match="pip install obstore"):
        WebDataset(True, "s3://bucket/a.tar")
