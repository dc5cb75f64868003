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
import tarfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from data.webdataset import WebDataset, WebDatasetStream
from fakes import write_tar
from object_server import Faults, serve_folder, serve_through
from PIL import Image

from data import object_store, tar_index
from data.errors import DataError
from data.subset import Subset
from loaders import Random, WorkerLoader
from scripts import index_tars

pytest.importorskip("obstore", reason="needs the package obstore")
SHARDS, IMAGES = 3, 40  # of each shard
NAMES = f"train-{{0..{SHARDS - 1}}}.tar"
SECRET = "sesame"
BUCKETS = itertools.count()


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """The user's cache is empty, and no credentials are set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


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
        renew(monkeypatch, "_store")  # a process keeps the server of its first request
        return f"s3://{name}"

    return start


def renew(monkeypatch, name):
    """Forgets what a function of object_store has returned."""
    monkeypatch.setattr(object_store, name, object_store.once(getattr(object_store, name).__wrapped__))


@pytest.fixture(params=["web", "bucket"])
def store(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["libcurl", "obstore"])
def transport(request, monkeypatch):
    """What makes the requests of a batch first."""
    if request.param == "libcurl":
        pytest.importorskip("pycurl", reason="needs the package pycurl")
    else:
        monkeypatch.setattr(object_store, "_client", lambda *_: None)


def read_batches(dataset, kill=None, **options):
    """All batches of two epochs. After each, `kill` is sent to a worker."""
    if hasattr(dataset, "__len__"):
        dataset[0]  # the parent uses obstore before it forks
    batches = []
    options = {"shuffle": True, "num_workers": 2, "persistent_workers": True, **options}
    with WorkerLoader(dataset, 8, seed=3, max_restarts=100, **options) as loader:
        for _ in range(2):
            for batch in loader:
                batches.append({name: value.clone() for name, value in batch.items()})
                if kill is not None:
                    os.kill(multiprocessing.active_children()[0].pid, kill)
    return batches


def assert_equal(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["image"], other["image"]) and torch.equal(one["label"], other["label"])


@pytest.mark.usefixtures("transport")
def test_batches_are_those_from_disk_whatever_requests_fail(store, folder, monkeypatch):
    monkeypatch.setattr(object_store, "STALL_SECONDS", 1)
    faults = Faults(0.03, refused=0.05, cut=0.02, stalled=0.01, seed=1)
    dataset = WebDataset(True, f"{store(faults)}/{NAMES}", image_size=16)
    assert_equal(read_batches(dataset), read_batches(WebDataset(True, f"{folder}/train-*.tar", image_size=16)))
    assert min(faults.spoilt[kind] for kind in ("refused", "cut", "stalled")) > 0
    assert faults.most > 4  # in flight at the same time


def read_files(dataset, indices):
    return {row: data for row, (data, _) in dataset.encoded_rows(np.array(indices))}


def test_libcurl_makes_the_requests_that_do_not_fail(store, images, monkeypatch):
    pytest.importorskip("pycurl", reason="needs the package pycurl")
    dataset = WebDataset(True, f"{store(Faults())}/{NAMES}", image_size=16, requests=4)
    monkeypatch.setattr(object_store.RangeReader, "__call__", None)
    monkeypatch.setattr(object_store, "_threads", lambda *_: None)
    assert read_files(dataset, [119, *range(100)]) == dict(enumerate([images[119], *images[:100]]))


class Interrupting:
    """A CurlMulti whose first answers are lost, as if Ctrl-C came when it had returned them."""

    def __init__(self, multi):
        self.multi = multi

    def __getattr__(self, name):
        return getattr(self.multi, name)

    def info_read(self):
        answers = self.multi.info_read()
        if answers[1]:
            raise KeyboardInterrupt
        return answers


def test_an_interrupt_loses_no_request(web, images):
    pytest.importorskip("pycurl", reason="needs the package pycurl")
    dataset = WebDataset(True, f"{web(Faults(0.01))}/{NAMES}", image_size=16, requests=2)
    first, second = np.arange(9), np.arange(9, 20)
    client = object_store._client(2)
    client._multi = Interrupting(client._multi)
    dataset.will_read(second)
    with pytest.raises(KeyboardInterrupt):
        read_files(dataset, first)
    assert read_files(dataset, second) == dict(enumerate(images[9:20]))  # requested before
    assert read_files(pickle.loads(pickle.dumps(dataset)), first) == dict(enumerate(images[:9]))
    assert object_store._client(2) is not client


def test_requests_that_wait_for_a_server_do_not_delay_the_end_of_a_program(python, bound):
    program = """
import threading
from data.object_store import answers
began = threading.Event()
waiting = answers([lambda: began.set() or threading.Event().wait()], 2)
assert began.wait(60)
"""
    python.run("-c", program, timeout=bound, check=True)


def test_obstore_reads_what_libcurl_may_not(web, images, monkeypatch):
    client = pytest.importorskip("data.range_client", reason="needs the package pycurl")
    faults = Faults()
    url = web(faults)
    dataset = WebDataset(True, f"{url}/{NAMES}", image_size=16, requests=4)
    monkeypatch.setattr(client, "address", lambda *_: f"{url}/secret.tar")
    for _ in range(2):
        assert read_files(dataset, range(20)) == dict(enumerate(images[:20]))
    asked = sum(count for (_, path, _), count in faults.seen.items() if path == "/secret.tar")
    assert 1 <= asked <= 20  # those of the first batch, at most


def test_a_stream_reads_each_byte_once_whatever_requests_fail_and_workers_die(store, folder, monkeypatch):
    monkeypatch.setattr(tar_index, "BLOCK", 1 << 13)
    monkeypatch.setattr(object_store, "STALL_SECONDS", 1)
    faults = Faults(seed=1)
    keys = {"classes": list("01234"), "image_size": 16}
    remote = WebDatasetStream(True, f"{store(faults)}/{NAMES}", **keys)
    local = WebDatasetStream(True, f"{folder}/train-*.tar", **keys)
    assert len(list(remote)) == SHARDS * IMAGES  # the parent uses obstore before it forks
    spans = [map(int, span.removeprefix("bytes=").split("-")) for method, _, span in faults.seen if method == "GET"]
    assert sum(last + 1 - first for first, last in spans) <= sum(path.stat().st_size for path in folder.iterdir())
    faults.shares = 0.05, 0.05, 0.02
    expected = read_batches(local, shuffle=False, streams=2, num_workers=1)
    assert_equal(read_batches(remote, shuffle=False, streams=2), expected)
    assert min(faults.spoilt[kind] for kind in ("refused", "cut", "stalled")) > 0
    assert_equal(read_batches(remote, kill=signal.SIGKILL, shuffle=False, streams=2), expected)


@pytest.mark.parametrize(
    "options", [{"kill": signal.SIGKILL}, {"worker_method": "thread"}, {"num_workers": 0, "persistent_workers": False}]
)
def test_batches_are_those_from_disk_in_any_kind_of_worker_that_may_be_killed(web, folder, options):
    dataset = WebDataset(True, f"{web(Faults())}/{NAMES}", image_size=16)
    expected = read_batches(WebDataset(True, f"{folder}/train-*.tar", image_size=16), num_workers=1)
    assert_equal(read_batches(dataset, **options), expected)


def test_the_threads_of_a_forked_process_load_one_copy_of_the_package(web, images, bound):
    dataset = WebDataset(True, f"{web(Faults())}/{NAMES}", image_size=16)  # the parent uses obstore before it forks

    def read() -> None:
        together, loads, load = threading.Barrier(8), [], object_store._load_copy
        object_store._load_copy = lambda *name: loads.append(name) or load(*name)
        with ThreadPoolExecutor(8, initializer=together.wait) as pool:
            assert [data for data, _ in pool.map(dataset.encoded, range(8))] == images[:8]
        assert len(loads) == 1

    def in_child(function) -> None:
        child = multiprocessing.get_context("fork").Process(target=function)
        child.start()
        child.join(bound)
        assert child.exitcode == 0

    def read_and_fork() -> None:
        read()
        in_child(read)

    in_child(read_and_fork)


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


def test_files_for_a_gpu_are_in_the_order_of_their_rows(web, folder):
    found = []
    for urls in (f"{web(Faults(0.01))}/{NAMES}", f"{folder}/train-*.tar"):
        dataset = WebDataset(True, urls, decode_on="device")
        out, indices = {"label": torch.empty(30, dtype=torch.int64)}, np.arange(30) * 4 % 119
        dataset.read_batch(indices, out, Random(0, indices))
        found.append(out["image"])
    assert torch.equal(found[0].data, found[1].data) and found[0].sizes == found[1].sizes


def wds2idx(path, shift=0):
    """The index that DALI's wds2idx makes of a tar."""
    samples: dict[str, list[str]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            stem, _, kind = member.name.partition(".")
            samples.setdefault(stem, []).append(f"{kind} {member.offset_data + shift} {member.size} {member.name}")
    return "\n".join([f"v1.2 {len(samples)}", *map(" ".join, samples.values()), ""]).encode()


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
        found: dict[str, int] = {}
        for (method, path, span), count in faults.seen.items():
            first, last = map(int, re.findall(r"\d+", span or "0-0"))
            if method == "GET":
                found[path.rpartition("/")[2]] = found.get(path.rpartition("/")[2], 0) + count * (last - first + 1)
        return found

    sizes = {f"train-{number}.tar": (folder / f"train-{number}.tar").stat().st_size for number in range(SHARDS)}
    whole = opened()
    assert {name: whole[name] for name in sizes} == sizes  # each was read once
    assert opened(cached=True) == {}
    for name in sizes:
        object_store.request("put", f"{url}/{name.removesuffix('.tar')}.idx", wds2idx(folder / name))
    labels = opened()
    assert all(labels[name] == IMAGES * (512 + 1) for name in sizes)  # with the headers before them
    index_tars.main([f"{url}/{NAMES}"])
    assert opened().keys() == {f"{name}.index.npz" for name in sizes}


@pytest.mark.usefixtures("transport")
def test_a_tar_that_changes_is_an_error_and_never_another_image(store, folder):
    url = store(Faults())
    dataset = WebDataset(True, f"{url}/{NAMES}", image_size=16)
    dataset[45]
    content = (folder / "train-1.tar").read_bytes().replace(b"\xff\xd8", b"\xff\xd9")
    object_store.request("put", f"{url}/train-1.tar", content)
    dataset[5]
    words = (
        rf"{url}/train-1.tar, bytes [\d,]+ to [\d,]+, cannot be read \(.*\); it has changed since its index was read"
    )
    with pytest.raises(DataError, match=words):
        dataset[45]
    with pytest.raises(DataError, match=words):
        read_files(dataset, [5, 45])
    assert len(WebDataset(True, f"{url}/train-1.tar")) == IMAGES  # a new run makes a new index


def test_an_index_of_another_tar_is_refused(web, folder, tmp_path):
    url = web(Faults())
    index_tars.main([f"{url}/train-0.tar"])
    shutil.rmtree(tmp_path / "cache")
    (folder / "train-0.tar.index.npz").rename(folder / "train-1.tar.index.npz")
    with pytest.raises(
        DataError, match=r"train-1.tar.index.npz is the index of another tar, .* run `python scripts/ind"
    ):
        WebDataset(True, f"{url}/train-1.tar")
    index_tars.main([f"{url}/train-1.tar"])
    assert len(WebDataset(True, f"{url}/train-1.tar")) == IMAGES
    for wrong in (wds2idx(folder / "train-2.tar", 512), wds2idx(folder / "train-2.tar", 1 << 30), b"v1.2 1\nfoo\n"):
        (folder / "train-2.idx").write_bytes(wrong)
        with pytest.raises(DataError, match=rf"{url}/train-2.idx is not the index of {url}/train-2.tar \(.*; make it"):
            WebDataset(True, f"{url}/train-2.tar")


def test_after_the_attempts_the_error_names_the_range_and_the_last_reason(web):
    faults = Faults()
    dataset = WebDataset(True, f"{web(faults)}/{NAMES}", image_size=16, attempts=3)
    faults.seen.clear()
    faults.shares = (1.0, 0, 0)
    with pytest.raises(
        DataError, match=r"train-0.tar, bytes 512 to 1,\d+, cannot be read \(.*503.*\); check the network"
    ):
        dataset[0]
    assert sum(faults.seen.values()) == 3
    with pytest.raises(DataError, match=r"train-0.tar, bytes 512 .*503"):
        read_files(dataset, [0])
    assert sum(faults.seen.values()) == 6


def test_a_range_that_lacks_bytes_is_requested_again_and_then_an_error(web):
    faults = Faults()
    dataset = WebDataset(True, f"{web(faults)}/{NAMES}", image_size=16, attempts=2)
    whole = dataset.encoded(0)
    faults.short = 1
    assert dataset.encoded(0) == whole and faults.short == 0
    faults.short = 1
    assert read_files(dataset, [0]) == {0: whole[0]} and faults.short == 0
    faults.short = 2
    with pytest.raises(DataError, match=r"train-0.tar, bytes .* cannot be read \(the server sent [\d,]+ bytes\)"):
        dataset.encoded(0)


def test_an_answer_that_stalls_when_the_shards_are_opened_is_requested_again(web, monkeypatch):
    monkeypatch.setattr(object_store, "OPENING_SECONDS", 3)
    faults, held = Faults(), threading.Event()

    def hold(path, _):
        if path.endswith(".npz") and not held.is_set():
            held.set()
            never.wait(30)

    never, faults.hold = threading.Event(), hold
    assert len(WebDataset(True, f"{web(faults)}/train-0.tar")) == IMAGES and held.is_set()
    never.set()


def test_credentials_are_in_no_error_and_not_in_the_dataset(bucket):
    dataset = WebDataset(True, f"{bucket(Faults())}/{NAMES}", image_size=16)
    assert SECRET.encode() not in pickle.dumps(dataset)
    with pytest.raises(DataError) as caught:
        WebDataset(True, "s3://nowhere/a.tar")
    report = "".join(traceback.format_exception(caught.value))
    assert "s3://nowhere/a.tar is not there, or its bucket is not; check the name" in report
    assert SECRET not in report
    for url in (f"https://host/a.tar?Signature={SECRET}", f"s3://me:{SECRET}@bucket/a.tar"):
        with pytest.raises(DataError, match="a password or a signature") as caught:
            WebDataset(True, url)
        assert SECRET not in str(caught.value)


def test_what_cannot_work_is_said_in_a_sentence(web, folder, monkeypatch):
    monkeypatch.setattr(object_store, "OPENING_SECONDS", 1)
    (folder / "compressed.tar").write_bytes(gzip.compress((folder / "train-0.tar").read_bytes()))
    (folder / "cut.tar").write_bytes((folder / "train-0.tar").read_bytes()[:3000])
    url = web(Faults())
    for urls, words in (
        (f"{url}/none.tar", "none.tar is not there, or its bucket is not; check the name"),
        (f"{url}/secret.tar", "403 Forbidden: ); set credentials that allow it: AWS_ACCESS_KEY_ID"),
        (f"{url}/weak.tar", "weak.tar: the server sends no strong ETag"),
        (f"{url}/compressed.tar", "compressed.tar cannot be read as an uncompressed tar ("),
        (f"{url}/cut.tar", "cut.tar cannot be read as an uncompressed tar (unexpected end of data)"),
        (f"{url}/train-*.tar", "wildcards are for local files; write braces"),
        ("http://127.0.0.1:1/a.tar", "http://127.0.0.1:1/a.tar cannot be read ("),
        ("http://no-such-host.invalid/a.tar", "check the network"),
    ):
        with pytest.raises(DataError, match=re.escape(words)):
            WebDataset(True, urls)


def test_credentials_that_are_missing_are_named(monkeypatch):
    with pytest.raises(DataError, match=r"Account must be specified\); set credentials: .*AZURE_STORAGE_ACCOUNT_NAME"):
        WebDataset(True, "az://container/a.tar")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    pytest.importorskip("boto3")
    with pytest.raises(DataError, match=r"\(The config profile \(nobody\) .*\); set AWS_PROFILE"):
        WebDataset(True, "s3://of-nobody/a.tar")


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("builder error")])
def test_too_many_open_files_are_named(error):
    with pytest.raises(DataError, match=r"ulimit -n\), or lower data\.requests"), object_store.store_errors("s3://a"):
        raise error


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(object_store, "_copies", [])
    renew(monkeypatch, "_library")
    with pytest.raises(DataError, match="pip install obstore"):
        WebDataset(True, "s3://bucket/a.tar")
