"""Threads for playbook code, so that blocking code never stops the event loop.

``concurrent.futures`` does not fit here: its threads are joined when the process ends, so one sleeping
script would hold a finished process, and a call that outlives its time limit would occupy its place for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from noetl_dagster.process.interrupts import Interrupted, interrupt, let_arrive

THREADS = 32
REPEAT_SECONDS = 5.0  # between interrupts of the same code: long enough for its `finally` to clean up
GRACE_SECONDS = 5.0  # for what code should not be interrupted in: a log's lock, an import, a `__del__`
LOOK_SECONDS = 0.02  # until code that could not be interrupted is looked at again


@dataclass(slots=True)
class _CodeJob:
    function: Callable[[], Any]
    future: asyncio.Future[Any]
    mailbox: _Mailbox
    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None  # where its code is being called; only then may it be interrupted
    abandoned: bool = False


class _Mailbox:
    """Outcomes for one event loop, which is woken once for all that are waiting.

    One wake-up for each would switch the interpreter between code and loop too often.
    """

    def __init__(self) -> None:
        self._outcomes: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False

    def put(self, future: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
        self._outcomes.append((future, value, failure))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                future.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before reading: later outcomes wake the loop again
        while self._outcomes:
            future, value, failure = self._outcomes.popleft()
            if future.done():
                continue
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(value)


class CodeThreads:
    """Daemon threads, started when needed, at most ``limit`` without the abandoned ones."""

    def __init__(
        self,
        limit: int = THREADS,
        repeat_seconds: float = REPEAT_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._limit = limit
        self._repeat_seconds = repeat_seconds
        self._grace_seconds = grace_seconds
        self._jobs: queue.SimpleQueue[_CodeJob] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting = 0  # jobs that no thread has finished or given up
        self._names = itertools.count(1)
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Runs ``function`` in a thread and returns its value or raises its exception.

        If the caller is cancelled (a time limit), the code is interrupted at its next Python instruction. A thread
        in a blocking call is abandoned until that call returns, and another thread replaces it.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = _Mailbox()
        # in the caller's context: what the code prints is logged with the names of its command
        job = _CodeJob(partial(copy_context().run, function), loop.create_future(), mailbox)
        with self._lock:
            self._waiting += 1
        self._jobs.put(job)
        self._start_if_needed()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            self._interrupt(job, loop, loop.time() + self._grace_seconds)
            raise

    def _start_if_needed(self) -> None:
        with self._lock:
            if self._waiting <= self._threads or self._threads >= self._limit:
                return
            self._threads += 1
        threading.Thread(target=self._run_jobs, name=f"noetl-code-{next(self._names)}", daemon=True).start()

    def _abandon(self, job: _CodeJob) -> None:
        with job.lock:
            job.abandoned = True
            if job.thread is None:
                return  # not begun: the thread that takes it drops it; or over already
            with self._lock:
                self._threads -= 1
                self._waiting -= 1
        self._start_if_needed()  # a job that waited for this place may be the last that ever comes

    def _interrupt(self, job: _CodeJob, loop: asyncio.AbstractEventLoop, grace_ends: float) -> None:
        """Raises ``Interrupted`` in abandoned code, again and again until the code has ended.

        Once is not enough: Python drops an exception that is raised in a ``__del__`` or a weakref callback, and
        code may catch it.
        """
        with job.lock:
            if job.thread is None:
                return
            sent = interrupt(job.thread, _call.__code__, everywhere=loop.time() >= grace_ends)
        loop.call_later(self._repeat_seconds if sent else LOOK_SECONDS, self._interrupt, job, loop, grace_ends)

    def _run_jobs(self) -> None:
        while self._perform(self._jobs.get()):
            with self._lock:
                self._waiting -= 1

    def _perform(self, job: _CodeJob) -> bool:
        """Runs one job; False if its caller has given it up meanwhile, which abandons this thread."""
        with job.lock:
            if job.abandoned:
                return True
            job.thread = threading.get_ident()
        value, failure, written_off = _call(job)
        if written_off:
            return False
        if failure is not None and not isinstance(failure, Exception):  # a future would take it for its own end
            failure = RuntimeError(f"the code raised {type(failure).__name__}: {failure}")
        job.mailbox.put(job.future, value, failure)
        return True


def _call(job: _CodeJob) -> tuple[Any, BaseException | None, bool]:
    """Calls the code of a job. Returns its value, its exception, and whether its caller has given it up meanwhile.

    Interrupts end here. One is sent only while the code's own frames are above this one, so the last one arrives,
    at the latest, when the code has just returned. This function waits for it, and the outer ``try`` catches it. A
    second one cannot arrive: none is sent to this frame itself, and none once the job has no thread.
    """
    value: Any = None
    failure: BaseException | None = None
    written_off = True  # as every thread is that an interrupt was sent to
    try:
        try:
            value = job.function()
        except BaseException as error:
            failure = error
        with job.lock:  # given up before: the thread is written off; afterwards: there is nothing to give up
            job.thread, written_off = None, job.abandoned
        if written_off:
            let_arrive()
    except Interrupted:
        with job.lock:
            job.thread = None
    return value, failure, written_off
