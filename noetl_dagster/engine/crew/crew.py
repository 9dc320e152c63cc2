"""The helpers of the process that drives executions: when to have them, how they start, what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noetl_dagster import machine
from noetl_dagster.engine.crew.team import CANCELLED, Job, Share, Tally, Team
from noetl_dagster.engine.crew.wire import Line, Message, packed
from noetl_dagster.process import log_context
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.settings import Settings, dump_settings

logger = logging.getLogger(__name__)

TEMPLATE = "noetl_dagster.engine.helper"
"""Module that runs as the template: it imports what helpers need, and forks them."""

LOOK_SECONDS = 0.25
BUSY_SHARE = 0.7
BUSY_LOOKS = 3
"""So many looks in a row at which this process wanted more than this share of a core: helpers will pay."""

IDLE_SECONDS = 30.0
"""Helpers without work for so long are sent home."""

CLOSE_SECONDS = 10.0


class Helper:
    """A helper process, from here."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.pid: int | None = None

    def send(self, message: Message) -> None:
        self._line.send(message)

    async def receive(self) -> Message | None:
        return await self._line.receive()

    def kill(self) -> None:
        """Ends the process at once; what it had goes to others."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._line.close()


class Crew:
    """Has helpers work on teams. One for each process; on that process's event loop.

    How many processes work on an execution, this one included, is the execution's own number, else the
    settings'. 0 leaves it to this process: as many as there are cores, once it has been busy for a moment.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._wanted: dict[int, int] = {}
        self._teams: dict[int, Team] = {}
        self._helpers: set[Helper] = set()
        self._template: _Template | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._listening: set[asyncio.Task[None]] = set()
        self._broken = False
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """The helpers that live."""
        return [helper.pid for helper in self._helpers if helper.pid is not None]

    def set_processes(self, execution_id: int, processes: int) -> None:
        """Processes for one execution, as its run was told; 0: as it seems best."""
        self._wanted[execution_id] = processes

    @contextmanager
    def team(self, job: Job, start: int, stop: int, places: int) -> Iterator[Share]:
        """A team for items ``start <= index < stop``, ``places`` at once."""
        wanted = self._processes(job.execution_id)
        if places < 2 or stop - start < 2 or wanted == 1 or self._broken:
            yield Team(job, start, stop, places)
            return
        team = Team(job, start, stop, places, wanted)
        self._teams[team.number] = team
        for helper in self._helpers:
            team.join(helper, wanted, at_once=True)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(
                self._watch(), context=log_context.empty()
            )
        try:
            yield team
        finally:
            del self._teams[team.number]

    async def close(self) -> None:
        """Sends the helpers home."""
        if self._watching is not None:
            await cancel_and_wait(self._watching)
        if self._starting is not None:
            await cancel_and_wait(self._starting)
        await self._dismiss()

    def _processes(self, execution_id: int) -> int:
        wanted = self._wanted.get(execution_id) or self._settings.run_processes
        return wanted or machine.processes()

    def _is_told(self) -> bool:
        """Whether somebody has said how many processes are to be had."""
        return any(
            self._wanted.get(team.job.execution_id) or self._settings.run_processes > 1
            for team in self._teams.values()
        )

    async def _watch(self) -> None:
        """Starts helpers when there is work for them, and ends them when there is none."""
        busy, idle_since = 0, time.monotonic()
        before, cpu = time.monotonic(), _wanted_cpu()
        while self._teams or self._helpers:
            if self._is_told() and not self._listening:
                busy = BUSY_LOOKS
            if busy >= BUSY_LOOKS and (self._starting is None or self._starting.done()):
                self._starting = asyncio.create_task(self._start())
                await asyncio.wait({self._starting})
                busy = 0
            await asyncio.sleep(LOOK_SECONDS)
            now, used = time.monotonic(), _wanted_cpu()
            busy = busy + 1 if self._teams and used - cpu > BUSY_SHARE * (now - before) else 0
            before, cpu = now, used
            if self._teams:
                idle_since = now
            elif now - idle_since > IDLE_SECONDS:
                await self._dismiss()

    async def _start(self) -> None:
        """Starts the helpers that are missing."""
        if not self._teams or self._broken:
            return
        processes = max(self._processes(team.job.execution_id) for team in self._teams.values())
        missing = processes - 1 - len(self._listening)
        if missing <= 0:
            return
        kinds = sorted({kind for team in self._teams.values() for kind in team.job.tool_kinds})
        try:
            if self._template is not None and not self._template.lives:
                self._template.close()
                self._template = None
            if self._template is None:
                self._template = _Template.start(self._settings, kinds)
            for _ in range(missing):
                self._listen(Helper(await Line.over(self._template.fork())))
        except OSError as error:
            self._broken = True
            logger.warning("this run works in one process: its helpers cannot be started: %s", error)

    def _listen(self, helper: Helper) -> None:
        task = asyncio.get_running_loop().create_task(self._hear(helper), context=log_context.empty())
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    async def _hear(self, helper: Helper) -> None:
        """Answers a helper until it is gone; its teams then have what it left."""
        try:
            while (message := await helper.receive()) is not None:
                self._answer(helper, message)
        finally:
            if helper in self._helpers:
                self._helpers.discard(helper)
                logger.info("helper %s of this run is gone", helper.pid)
            elif not self._closing:
                self._broken = True
                logger.warning("this run works in one process: a helper ended before it could begin")
            helper.close()
            for team in self._teams.values():
                team.ended(helper, Tally(), well=False)

    def _answer(self, helper: Helper, message: Message) -> None:
        if message["do"] == "ready":
            helper.pid = message["pid"]
            self._helpers.add(helper)
            for open_team in self._teams.values():
                open_team.join(helper, self._processes(open_team.job.execution_id), at_once=False)
            return
        if (team := self._teams.get(message["team"])) is None:
            return
        match message["do"]:
            case "take":
                team.asked(helper)
            case "failed":
                team.stop()
            case "over":
                error = message.get("error")
                if error not in (None, CANCELLED):
                    logger.warning("helper %s left step %s: %s", helper.pid, team.job.step, error)
                tally = Tally(message["done"], message["failed"])
                team.ended(helper, tally, well=error is None)

    async def _dismiss(self) -> None:
        self._closing = True
        for helper in list(self._helpers):
            helper.send({"do": "end"})
        if self._listening and self._helpers:
            await asyncio.wait(self._listening, timeout=CLOSE_SECONDS)
        if self._template is not None:
            self._template.close()
            self._template = None
        await cancel_and_wait(*self._listening)
        self._closing = False


def _wanted_cpu() -> float:
    """Seconds for which this process has run or, on a busy machine, waited for a core."""
    waited = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            waited += int(thread.read_text().split()[1])
    return time.process_time() + waited / 1e9


class _Template:
    """A process that has imported what helpers need, in one thread, and forks them on request.

    It and its helpers end with this process: they read from a pipe that only this process writes to.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, lifeline: int) -> None:
        self._process = process
        self._control = control
        self._lifeline = lifeline

    @classmethod
    def start(cls, settings: Settings, kinds: list[str]) -> _Template:
        own, theirs = socket.socketpair()
        reading, writing = os.pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", TEMPLATE, str(theirs.fileno()), str(reading)],
                pass_fds=(theirs.fileno(), reading),
                stdin=subprocess.DEVNULL,
            )
        os.close(reading)
        own.sendall(packed({"settings": dump_settings(settings), "tool_kinds": kinds}))
        return cls(process, own, writing)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> socket.socket:
        """A new helper's socket; the helper says when it is ready."""
        own, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        own.setblocking(False)
        return own

    def close(self) -> None:
        """Ends the template, and with it every helper that still lives."""
        self._control.close()
        os.close(self._lifeline)
        threading.Thread(target=self._process.wait, daemon=True).start()  # so that no zombie stays
