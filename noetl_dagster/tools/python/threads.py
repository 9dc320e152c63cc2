"""Threads that run playbook code, so that blocking code never stops the event loop.

``concurrent.futures`` does not fit here: its threads are joined when the process ends, so one sleeping
script would hold a finished process, and a call that outlives its time limit would occupy its place for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

THREADS = 32
REPEAT_SECONDS = 5.0  # between interrupts of the same code: long enough for its `finally` to clean up


class Interrupted(BaseException):
    """Raised inside code whose time is up. ``except Exception`` lets it through."""


@dataclass(slots=True)
class _Job:
    function: Callable[[], Any]
    future: asyncio.Future[Any]
    mailbox: _Mailbox
    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None
    abandoned: bool = False


class _Mailbox:
    """Outcomes on their way to one event loop, which is woken once for all that are waiting.

    A wake-up for each would hand the interpreter back and forth between code and loop.
    """

    def __init__(self) -> None:
        self._outcomes: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False

    def put(self, future: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
        self._outcomes.append((future, value, failure))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile; nobody waits
                future.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the first look: what comes later wakes the loop again
        while self._outcomes:
            _finish(*self._outcomes.popleft())


class CodeThreads:
    """Daemon threads, started when needed, at most ``limit`` that are not written off."""

    def __init__(self, limit: int = THREADS, repeat_seconds: float = REPEAT_SECONDS) -> None:
        self._limit = limit
        self._repeat_seconds = repeat_seconds
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting = 0  # jobs that no thread has finished or given up
        self._names = itertools.count(1)
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Runs ``function`` in a thread and gives its value or raises its exception.

        When the caller is cancelled (a time limit), the code is interrupted at its next Python instruction. A
        thread that hangs in a blocking call is written off until that call returns; another takes its place.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = _Mailbox()
        job = _Job(function, loop.create_future(), mailbox)
        self._submit(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            self._interrupt(job, loop)
            raise

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._waiting += 1
            start = self._waiting > self._threads and self._threads < self._limit
            if start:
                self._threads += 1
        self._jobs.put(job)
        if start:
            threading.Thread(target=self._work, name=f"noetl-code-{next(self._names)}", daemon=True).start()

    def _abandon(self, job: _Job) -> None:
        with job.lock:
            job.abandoned = True
            if job.thread is None:
                return  # not begun: the thread that takes it drops it; or over already
            with self._lock:
                self._threads -= 1
                self._waiting -= 1

    def _interrupt(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ``Interrupted`` in abandoned code, again and again until the code has ended.

        Once is not enough: Python drops an exception that is raised in a ``__del__`` or a weakref callback.
        """
        with job.lock:
            if job.thread is None:
                return
            identity, error = ctypes.c_ulong(job.thread), ctypes.py_object(Interrupted)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, error)
        loop.call_later(self._repeat_seconds, self._interrupt, job, loop)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if not self._perform(job):
                    return
            except Interrupted:  # written off between two instructions
                job.thread = None  # its number may be given to another thread
                return
            with self._lock:
                self._waiting -= 1

    def _perform(self, job: _Job) -> bool:
        """Runs one job; False when its caller gave it up meanwhile and this thread was written off."""
        with job.lock:
            if job.abandoned:
                return True
            job.thread = threading.get_ident()
        value: Any = None
        failure: BaseException | None = None
        try:
            value = job.function()
        except BaseException as error:
            failure = error
        with job.lock:
            job.thread = None
            if job.abandoned:
                return False
        if isinstance(failure, SystemExit | KeyboardInterrupt):
            failure = RuntimeError(f"the code called {type(failure).__name__}: {failure}")
        job.mailbox.put(job.future, value, failure)
        return True


def _finish(future: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(value)
