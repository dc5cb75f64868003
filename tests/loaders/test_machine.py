"""What a process may use of its machine, read from files laid out as the kernel does."""

import os
from pathlib import Path

import pytest

from loaders.machine import available_cores, available_memory


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Lays out files; the process may run on 8 cores, and no torchrun started it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: set(range(8))}[pid], raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def lay_out(**files: str) -> Path:
        for path, content in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return tmp_path

    return lay_out


V2 = {"proc/self/cgroup": "0::/jobs/7\n"}
GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "max 100000\n"}, 8),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "300000 100000\n"}, 3),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "250000 100000\n"}, 3),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "3200000 100000\n"}, 8),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "1 1\n"}, 1),
        ({"proc/self/cgroup": "0::/a:b\n", f"{GROUPS}/a:b/cpu.max": "200000 100000\n"}, 2),
        ({**V2, f"{GROUPS}/jobs/7/cpu.max": "max 100000\n", f"{GROUPS}/jobs/cpu.max": "200000 100000\n"}, 2),
        ({**V2, f"{GROUPS}/cpu.max": "50000 100000\n"}, 1),  # in a container, which does not see the host's folders
    ],
)
def test_the_cores_are_those_of_affinity_and_quota(machine, files, cores):
    assert available_cores(machine(**files)) == cores


def test_ranks_of_one_machine_share_its_cores_and_memory(machine, monkeypatch):
    files = machine(**V2, **{"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4000 kB\n"})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert available_cores(files) == 2
    assert available_memory(files) == 4000 * 1024 // 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert available_cores(files) == 1
    for odd in ("0", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", odd)
        assert available_cores(files) == 8


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


@pytest.mark.parametrize(("count", "cores"), [(6, 6), (None, 1)])
def test_without_affinity_the_cores_are_those_of_the_machine(monkeypatch, tmp_path, count, cores):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_cores(tmp_path) == cores


@pytest.mark.parametrize("content", ["", "max", "many few"])
def test_limits_that_cannot_be_read_count_as_none(machine, content):
    names = ("cpu.max", "memory.max", "memory.current", "memory.stat")
    files = {f"sys/fs/cgroup/jobs/{name}": content for name in names}
    root = machine(
        **files, **{"proc/self/cgroup": "0::/jobs\nno colons\none:colon\n", "proc/meminfo": "MemAvailable:\n"}
    )
    assert available_cores(root) == 8
    assert available_memory(root) is None
