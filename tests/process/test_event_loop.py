"""The bridge from synchronous code."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from noetl_dagster.process.event_loop import background_loop, run_sync


async def where() -> tuple[str, int]:
    await asyncio.sleep(0)
    return threading.current_thread().name, id(asyncio.get_running_loop())


def test_everything_runs_on_one_loop() -> None:
    with ThreadPoolExecutor(4) as threads:
        places = set(threads.map(lambda _: run_sync(where()), range(20)))
    assert places == {("noetl-loop", id(background_loop()))}


def test_errors_and_time_limits_reach_the_caller() -> None:
    async def fail() -> None:
        raise LookupError("here")

    begun, cancelled = threading.Event(), threading.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    with pytest.raises(LookupError, match="here"):
        run_sync(fail())
    limit = 0.05
    while not begun.is_set():  # on a busy machine the time may be up before the coroutine begins
        with pytest.raises(TimeoutError):
            run_sync(hang(), timeout=limit)
        limit *= 4
    assert cancelled.wait(60)


def test_waiting_for_itself_is_refused() -> None:
    async def nested() -> None:
        run_sync(where())

    with pytest.raises(RuntimeError, match="await the coroutine instead"):
        run_sync(nested())


def test_it_may_be_called_under_another_loop() -> None:
    async def outer() -> str:
        return run_sync(where())[0]

    assert asyncio.run(outer()) == "noetl-loop"


def child(results: multiprocessing.SimpleQueue[tuple[str, int]]) -> None:
    results.put((run_sync(where())[0], os.getpid()))


def test_a_forked_child_has_a_loop_of_its_own() -> None:
    run_sync(where())
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=child, args=(results,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    name, pid = results.get()
    assert name == "noetl-loop"
    assert pid == process.pid


def test_a_process_ends_after_native_threads_have_left_python() -> None:
    """A thread that ``threading`` does not know stands for one of obstore's."""
    program = """
import _thread, os, time
import noetl_dagster.process.event_loop
begun = _thread.allocate_lock()
begun.acquire()
def native():
    begun.release()
    time.sleep(0.2)  # without the GIL
    os.write(1, b"left")
_thread.start_new_thread(native, ())
begun.acquire()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("left", "", 0)
