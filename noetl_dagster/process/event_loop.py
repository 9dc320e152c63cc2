"""Runs coroutines from synchronous code.

Dagster calls ops, IO managers and sensors synchronously, but the core is async. Each process has one event loop in a
daemon thread. Connection pools, clients and stores live on that loop, so a pool that one op opens serves the next op.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from typing import Any, TypeVar

T = TypeVar("T")

NATIVE_THREADS_SECONDS = 1.0
"""How long the end of a process waits for threads of native libraries that run Python code."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process and starts it on first use."""
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_serve, args=(_loop,), name="noetl-loop", daemon=True)
            _thread.start()
        return _loop


def run_sync(coroutine: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
    """Runs a coroutine on the background loop and returns its result.

    An interrupt of the waiting thread (Dagster's termination, Ctrl-C) cancels the coroutine.

    Raises:
        RuntimeError: the caller runs on the background loop, so waiting would never end.
        TimeoutError: the coroutine was cancelled after ``timeout`` seconds.
    """
    loop = background_loop()
    if threading.current_thread() is _thread:
        coroutine.close()
        raise RuntimeError("run_sync() was called on the background loop itself; await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(timeout)
    except FutureCancelledError:
        raise asyncio.CancelledError from None
    except BaseException:
        future.cancel()  # no effect when the coroutine itself failed
        raise


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancels all tasks at once and waits until they have ended."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _forget_after_fork() -> None:
    """Gives a forked child its own loop, since threads do not survive ``fork``; they may have held the lock."""
    global _lock, _loop, _thread
    _lock, _loop, _thread = threading.Lock(), None, None


os.register_at_fork(after_in_child=_forget_after_fork)


@atexit.register
def _wait_for_native_threads() -> None:
    """Lets threads of native libraries leave Python before the interpreter ends.

    obstore's threads hand over results with ``call_soon_threadsafe``, which gives up the GIL while it wakes the loop.
    The woken process may end before such a thread has the GIL again. CPython 3.11 then ends the thread with
    ``pthread_exit``, which Rust answers with SIGABRT: a command that did its work would fail.
    """
    end = time.monotonic() + NATIVE_THREADS_SECONDS
    while True:
        time.sleep(0.001)  # gives up the GIL
        python_threads = {thread.ident for thread in threading.enumerate()}
        if sys._current_frames().keys() <= python_threads or time.monotonic() > end:
            return
