"""data=webdataset over a web server that spoils some of its answers, and over a real S3 server."""

import multiprocessing
import os
import pickle
import re
import shutil
import signal
import threading
import traceback
from functools import partial

import pytest

from extras.webdataset import index_tars, object_store, tar_index
from extras.webdataset.object_store import in_another_process
from extras.webdataset.tests.object_server import ObjectServer
from extras.webdataset.tests.shards import write_shards
from extras.webdataset.webdataset import WebDataset, WebDatasetStream
from loaders import WorkerLoader
from tests.data.reading import read_batch, refused

pytest.importorskip("obstore", reason="needs the package obstore")
IMAGES = 24  # of each of two shards
NAMES = "train-{00..01}.tar"
SECRET = "sesame"


@pytest.fixture(autouse=True)
def as_in_a_new_process(tmp_path, monkeypatch):
    """The user's cache is empty. A test reads from the store only in processes that it forks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "STALL_SECONDS", 1)
    yield
    assert object_store._user is None


@pytest.fixture
def folder(tmp_path):
    """train-00.tar, of cats, and train-01.tar, of dogs."""
    write_shards(tmp_path, IMAGES)
    return tmp_path / "shards"


@pytest.fixture
def server(folder):
    with ObjectServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def read_batches(dataset, kill=False, **options):
    """The bytes of all batches of two epochs. After each, a worker is killed."""
    batches = []
    options = {"shuffle": True, "num_workers": 2, "persistent_workers": True, **options}
    with WorkerLoader(dataset, 8, seed=3, max_restarts=100, **options) as loader:
        for batch in (batch for _ in range(2) for batch in loader):
            batches.append((batch["image"].numpy().tobytes(), batch["label"].tolist()))
            if kill:
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    assert len(batches) >= 4 * IMAGES // 8
    return batches


@pytest.mark.parametrize("options", [{"kill": True}, {"worker_method": "thread"}], ids=["processes", "threads"])
def test_batches_are_those_from_disk_whatever_requests_fail_and_workers_die(server, folder, options):
    dataset = WebDataset(True, f"{server.url}/{NAMES}", image_size=16)
    expected = read_batches(WebDataset(True, f"{folder}/train-*.tar", image_size=16), num_workers=0)
    server.shares = (0.05, 0.05, 0.03)
    assert in_another_process(partial(read_batches, dataset, **options)) == expected
    assert server.spoilt == {"refused", "cut", "stalled", ""}


def test_a_stream_reads_each_byte_once_whatever_requests_fail_and_workers_die(server, folder, monkeypatch):
    monkeypatch.setattr(tar_index, "BLOCK", 1 << 13)
    keys = {"classes": ["cat", "dog"], "image_size": 16}
    options = {"shuffle": False, "streams": 2}
    remote = WebDatasetStream(True, f"{server.url}/{NAMES}", **keys)
    expected = read_batches(WebDatasetStream(True, f"{folder}/train-*.tar", **keys), num_workers=1, **options)
    assert read_batches(remote, **options) == expected
    spans = {tuple(map(int, re.findall(r"\d+", span))) for method, _, span in server.seen if method == "GET"}
    stored = sum(path.stat().st_size for path in folder.glob("train-*"))
    assert sum(last + 1 - first for first, last in spans) <= stored
    server.shares = 0.05, 0.05, 0.01
    assert read_batches(remote, kill=True, **options) == expected


def test_a_bucket_has_its_index_and_no_error_or_dataset_has_the_credentials(folder, monkeypatch):
    moto = pytest.importorskip("moto.server", reason="needs the package moto[server]")
    import boto3

    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    given = {
        "ACCESS_KEY_ID": "me",
        "SECRET_ACCESS_KEY": SECRET,
        "DEFAULT_REGION": "us-east-1",
        "ENDPOINT_URL": address,
    }
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="images")
    for path in folder.iterdir():
        client.upload_file(str(path), "images", path.name)
    index_tars.main([f"s3://images/{NAMES}"])
    client.head_object(Bucket="images", Key="train-01.tar.index.npz")
    dataset = WebDataset(True, f"s3://images/{NAMES}", image_size=16)
    assert read_batches(dataset) == read_batches(WebDataset(True, f"{folder}/train-*.tar", image_size=16))
    assert SECRET.encode() not in pickle.dumps(dataset)
    with refused(r"s3://nowhere/a.tar does not exist, or its bucket does not; check") as caught:
        WebDataset(True, "s3://nowhere/a.tar")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    server.stop()


def read_here_and_in_workers(dataset):
    dataset[0]
    read_batches(dataset)


def test_a_process_whose_parent_read_from_the_store_says_so_instead_of_waiting_for_ever(server):
    dataset = WebDataset(True, f"{server.url}/{NAMES}", image_size=16)
    with refused(r"was forked from one that had read .*multiprocessing_context='spawn'"):
        in_another_process(read_here_and_in_workers, dataset)


def test_requests_that_wait_for_a_server_do_not_delay_the_end_of_a_program(python, bound):
    program = """
import threading
from extras.webdataset.object_store import answers
began = threading.Event()
waiting = answers([lambda: began.set() or threading.Event().wait()], 2)
assert began.wait(60)
"""
    python.run("-c", program, timeout=bound, check=True)


def test_the_files_of_the_next_batch_are_requested_before_this_one_is_complete(server, bound):
    seen = set()
    both = threading.Barrier(2, timeout=bound)
    dataset = WebDataset(True, f"{server.url}/{NAMES}", image_size=16, attempts=1)

    def hold(request):
        seen.add(request)
        if len(seen) in (8, 9):  # the last file of the first batch, and the first of the next
            both.wait()  # an error after the bound

    server.hold = hold
    with WorkerLoader(dataset, 8, seed=0, num_workers=1, prefetch_factor=2) as loader:
        assert len(list(loader)) == 2 * IMAGES // 8


def test_an_index_is_in_the_cache_or_beside_the_shard_or_is_made(server, folder, tmp_path):
    def opened():
        """Opens the shards. Returns the files that were read."""
        server.seen.clear()
        dataset = WebDataset(True, f"{server.url}/{NAMES}", image_size=16)
        assert dataset.labels.tolist() == [0] * IMAGES + [1] * IMAGES
        assert dataset.path(IMAGES) == f"{server.url}/train-01.tar/dog/0.jpg"
        return {path[1:] for method, path, _ in server.seen if method == "GET"} & set(os.listdir(folder))

    shards = {path.name for path in folder.glob("train-*")}
    assert opened() == shards
    assert opened() == set()  # their indices are in the cache
    index_tars.main([f"{server.url}/{NAMES}"])
    shutil.rmtree(tmp_path / "cache")
    assert opened() == {f"{name}.index.npz" for name in shards}
    (folder / "train-00.tar.index.npz").rename(folder / "train-01.tar.index.npz")
    with refused(r"01.tar.index.npz is the index of another tar, .*webdataset/index_tars.py"):
        WebDataset(True, f"{server.url}/train-01.tar")


def test_what_fails_or_has_changed_is_an_error_and_never_another_image(server, folder):
    dataset = WebDataset(True, f"{server.url}/{NAMES}", image_size=16, attempts=2)
    tar = folder / "train-01.tar"
    tar.write_bytes(tar.read_bytes().replace(b"\xff\xd8", b"\xff\xd9"))
    in_another_process(dataset.encoded, 5)
    with refused(rf"{server.url}/train-01.tar, bytes [\d,]+ to .*has changed since its index"):
        in_another_process(read_batch, dataset, [5, 45])
    assert len(WebDataset(True, f"{server.url}/train-01.tar")) == IMAGES  # a new run makes a new index
    server.short = True
    with refused(r"train-00.tar, bytes .* cannot be read \(the server sent [\d,]+ bytes\)"):
        in_another_process(dataset.encoded, 0)
    server.seen.clear()
    server.shares = (1.0, 0, 0)
    with refused(r"00.tar, bytes 512 to .* cannot be read \(.*503.*\); check the network"):
        in_another_process(dataset.encoded, 0)
    assert len(server.seen) == 2


def test_a_url_that_cannot_work_is_named_without_its_password(server, folder, monkeypatch):
    monkeypatch.setattr(object_store, "OPENING_SECONDS", 1)
    (folder / "secret.tar").touch()
    (folder / "weak.tar").touch()
    for urls, words in (
        (f"{server.url}/secret.tar", "403 Forbidden: ); set credentials that allow it: AWS_ACCESS_KEY_ID"),
        (f"{server.url}/weak.tar", "weak.tar: the server sends no strong ETag"),
        ("http://127.0.0.1:1/a.tar", "http://127.0.0.1:1/a.tar cannot be read ("),
        (f"s3://me:{SECRET}@bucket/a.tar", "data.urls has a URL with a password or a signature"),
    ):
        with refused(re.escape(words)) as caught:
            WebDataset(True, urls)
        assert SECRET not in str(caught.value)
