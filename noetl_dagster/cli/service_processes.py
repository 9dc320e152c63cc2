"""Several processes that serve one address: a parent starts, restarts and ends them together.

Parent and child share a socket. The parent sends its listening socket over it, and the child reports on it that it is
ready; if one of them ends in any way, the other one's read returns. uvicorn's own supervisor does not replace this:
children survive a killed parent, each process reports an error at the start, processes that keep failing are restarted
without a pause, and a process that does not end is never killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before an ended process is started again; doubled each time that it ends soon after its start."""

STEADY_SECONDS = 60.0
"""A process that ran for this long had no problem at its start."""

END_SECONDS = 20.0
"""A process that still runs this long after SIGTERM is killed."""


@dataclass(slots=True)
class ServiceProcesses:
    """The parent's side. It keeps the listening socket open, so that no request is refused while processes start.

    The first process starts alone, since a problem (a setting, an unavailable database) would affect all. The problem
    is reported once, and ends the parent too.

    Attributes:
        command: of one process; the number of the descriptor of its socket is appended.
        count: number of processes.
        listener: bound, not listening yet.
        ready: called once, when the first process accepts requests.
        ended: called with the id of every process that has ended.
    """

    command: Sequence[str]
    count: int
    listener: socket.socket
    environment: Mapping[str, str]
    ready: Callable[[], None]
    ended: Callable[[int], None]
    _running: set[asyncio.subprocess.Process] = field(default_factory=set)
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    _ending: asyncio.Event = field(default_factory=asyncio.Event)
    _code: int = 0

    async def run(self) -> int:
        """Runs until SIGTERM or SIGINT, or until the first process fails to start; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        keepers = [asyncio.create_task(self._keep_running())]
        await self._begun.wait()
        keepers += [asyncio.create_task(self._keep_running()) for _ in range(1, self.count)]
        await self._ending.wait()
        self._send(signal.SIGTERM)
        _, late = await asyncio.wait(keepers, timeout=END_SECONDS)
        if late:
            logger.warning("%d processes do not end and are killed", len(late))
            self._send(signal.SIGKILL)
        await asyncio.gather(*keepers)
        return self._code

    async def _keep_running(self) -> None:
        pause = SHORTEST_PAUSE
        while not self._ending.is_set():
            began = time.monotonic()
            code = await self._run_process()
            if self._ending.is_set():
                return
            if not self._begun.is_set():
                self._code = code if code > 0 else 1
                self._end()
                return
            pause = SHORTEST_PAUSE if time.monotonic() - began > STEADY_SECONDS else pause
            logger.warning("a process ended with %d; another starts in %.1f s", code, pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _run_process(self) -> int:
        """Runs one process to its end; returns its exit code."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(*self.command, str(theirs.fileno())),
                    env=self.environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._running.add(process)
            if self._ending.is_set():
                self._send(signal.SIGTERM)
            with contextlib.suppress(OSError):  # it has ended already
                socket.send_fds(ours, [b"l"], [self.listener.fileno()])
                ours.setblocking(False)
                if await asyncio.get_running_loop().sock_recv(ours, 1) and not self._begun.is_set():
                    self._begun.set()
                    self.ready()
            code = await process.wait()
        self._running.discard(process)
        self.ended(process.pid)
        return code

    def _end(self) -> None:
        self._ending.set()
        self._begun.set()

    def _send(self, number: int) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


class ParentProcess:
    """The child's side: receives the parent's ``listener`` over the socket with the descriptor, which both share."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)  # processes that this one starts must not inherit it
        descriptors: list[int] = []
        with contextlib.suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise SystemExit(0)  # the parent has ended
        self.listener = socket.socket(fileno=descriptors[0])
        self.listener.set_inheritable(False)

    def report_ready(self) -> None:
        """Reports that this process accepts requests."""
        with contextlib.suppress(OSError):
            self._socket.send(b"r")

    def end_with_it(self) -> None:
        """Ends this process after pending requests, as SIGTERM does, when the parent ends for any reason."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                self._socket.recv(1)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="noetl-parent", daemon=True).start()
