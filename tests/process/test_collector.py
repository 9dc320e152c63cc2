"""Threads share their heaps, and memory that they have freed goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading

import psutil
import pytest

from noetl_dagster.process.collector import release_free_memory

MEGABYTE = 1024**2
HEAP_BYTES = 64 * MEGABYTE
"""The heap of a thread begins at a multiple of this."""

HEAPS = f"""
import re, threading
from noetl_dagster.process.collector import share_heaps
share_heaps({{count}})
gate = threading.Barrier(9)
def work():
    kept = [bytearray(3_000) for _ in range(100)]
    gate.wait()
    gate.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
gate.wait()
begins = (int(line.split("-")[0], 16) for line in open("/proc/self/maps") if re.search(" rw-p 0+ 00:00 0 *$", line))
print(sum(begin % {HEAP_BYTES} == 0 for begin in begins))
gate.wait()
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other heaps")


@pytest.mark.parametrize(("count", "heaps"), [(2, 1), (5, 4)])
def test_threads_share_heaps(count: int, heaps: int) -> None:
    """The first heap is that of the main thread, and lies elsewhere."""
    found = subprocess.run(
        [sys.executable, "-c", HEAPS.format(count=count)], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) == heaps


def test_free_memory_between_what_is_kept_goes_back() -> None:
    kept: list[list[bytearray]] = []

    def work() -> None:
        kept.append([bytearray(3_000) for _ in range(10_000)][::100])  # keeps one in each 300 KB

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = psutil.Process().memory_info().rss
    release_free_memory()
    assert before - psutil.Process().memory_info().rss > 50 * MEGABYTE
