"""Makes forks of a process with many libraries faster."""

import ctypes
from pathlib import Path

MADV_COLLAPSE = 25  # of Linux 6.1; older ones refuse it


def use_huge_pages() -> None:
    """Makes forks of this process twice as fast: a fork copies an entry per page, and torch takes 400 MB of pages."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, file, *name = line.split()
        if access == "rw-p" and file == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)
