"""Garbage collection around code whose objects stay, and memory that is free."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses garbage collection: what is loaded stays, and scanning it again and again costs a third."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Pauses garbage collection while modules are imported, and never scans them afterwards."""
    with collector_paused():
        yield
        gc.freeze()


def release_free_memory() -> None:
    """Returns free memory to the system, if the C library is glibc: threads fragment its heaps, and processes grow."""
    import ctypes  # only here, since every process imports this module

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
