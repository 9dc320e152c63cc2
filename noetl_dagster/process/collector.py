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


_M_ARENA_MAX = -8
"""A parameter of glibc's ``mallopt``."""


def share_heaps(count: int = 2) -> None:
    """Lets the threads of this process, and of those forked from it, share few heaps, if the C library is glibc.

    Otherwise threads take up to eight heaps for each core. What they free in one is of no use to the others.
    """
    _call("mallopt", _M_ARENA_MAX, count)


def release_free_memory() -> None:
    """Returns free memory to the system, if the C library is glibc: threads fragment its heaps, and processes grow."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    import ctypes  # only here, since every process imports this module

    if (function := getattr(ctypes.CDLL(None), name, None)) is not None:
        function(*arguments)
