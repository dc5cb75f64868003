"""What a process may use of its machine, read from files laid out as the kernel does."""

import os
import socket

import pytest

from loaders.machine import MachineFull, available_cores, available_memory, full_machine_explained

V2 = {"proc/self/cgroup": "0::/jobs/7\n"}
GROUPS = "sys/fs/cgroup"
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Lays out files; no torchrun started this process."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def lay_out(**files):
        for path, content in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return tmp_path

    return lay_out


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, 10**6),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "max 100000\n"}, 10**6),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "130000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a:b\n", f"{GROUPS}/a:b/cpu.max": "100000 100000\n"}, 1),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "max 100000\n", f"{GROUPS}/jobs/cpu.max": "100000 100000\n"}, 1),
        ({**V2, f"{GROUPS}/cpu.max": "50000 100000\n"}, 1),  # in a container, which does not see the host's folders
    ],
)
def test_the_cores_are_those_of_affinity_and_quota_shared_by_the_ranks(machine, files, quota, monkeypatch):
    assert available_cores(machine(**files)) == min(CORES, quota)
    for ranks, share in (("2", max(1, min(CORES, quota) // 2)), ("1024", 1), ("0", min(CORES, quota))):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert available_cores(machine(**files)) == share


def test_the_memory_is_what_is_free_within_the_limit_where_files_that_can_be_dropped_count_as_free(machine):
    free = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4000 kB\n"}
    limit = {
        f"{GROUPS}/jobs/7/memory.max": "3000000\n",
        f"{GROUPS}/jobs/7/memory.current": "2500000\n",
        f"{GROUPS}/jobs/7/memory.stat": "anon 2000000\ninactive_file 500000\n",
        f"{GROUPS}/jobs/memory.max": "max\n",
        f"{GROUPS}/jobs/memory.current": "2500000\n",
        f"{GROUPS}/jobs/memory.stat": "anon 2500000\n",
    }
    assert available_memory(machine(**V2, **limit, **free)) == 1000000
    assert available_memory(machine(**{"proc/self/cgroup": "0::/\n"})) == 4000 * 1024


def test_a_socket_whose_path_is_too_long_gets_what_to_shorten():
    with pytest.raises(MachineFull, match="TMPDIR is too long"), full_machine_explained("starting a worker process"):
        socket.socket(socket.AF_UNIX).bind("/tmp/" + 200 * "x")
