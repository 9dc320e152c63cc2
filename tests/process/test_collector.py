"""Memory that threads have freed goes back to the system."""

from __future__ import annotations

import platform
import threading

import psutil
import pytest

from noetl_dagster.process.collector import release_free_memory

MEGABYTE = 1024**2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no malloc_trim")
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
