"""What a helper does: opens a runtime of its own, and works on what its driver opens for it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from typing import Any

from noetl_dagster.engine.crew.ranges import Range
from noetl_dagster.engine.crew.team import CANCELLED, Tally, Work
from noetl_dagster.engine.crew.wire import Line, Message
from noetl_dagster.engine.fanout.shards import InlineShards
from noetl_dagster.engine.loops.loop import Loops
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionStateError
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.settings import Settings

CONNECTIONS = 4
"""Connections to the event log of one helper, at most."""


def help_driver(settings: Settings, connected: socket.socket, lifeline: int) -> None:
    """Works until the driver says that it is enough, or is gone."""
    threading.Thread(target=_end_with_driver, args=(lifeline,), name="noetl-lifeline", daemon=True).start()
    own = {"db_pool_size": min(CONNECTIONS, settings.db_pool_size), "run_processes": 1}
    connected.setblocking(False)
    asyncio.run(_Work.until_the_end(settings.model_copy(update=own), connected))


def _end_with_driver(lifeline: int) -> None:
    """Without its driver a helper must not go on: somebody else may resume the execution at once."""
    os.read(lifeline, 1)
    os._exit(1)


class RemoteShare:
    """A helper's share of a team: what it asks the driver for, and is told."""

    def __init__(self, line: Line, team: int) -> None:
        self._line = line
        self._team = team
        self._asked: deque[asyncio.Future[Range | None]] = deque()
        self._places = 0
        self._changed = asyncio.Event()
        self._stopped = False
        self._over = False

    async def take(self) -> Range | None:
        if self._stopped or self._over:
            return None
        future: asyncio.Future[Range | None] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._line.send({"do": "take", "team": self._team})
        return await future

    def leaves(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        self._stopped = True
        self._line.send({"do": "failed", "team": self._team})

    async def run(self, work: Work) -> Tally:
        """Works until the driver has nothing more; places may be added meanwhile."""
        async with asyncio.TaskGroup() as group:
            while not self._over and not self._stopped:
                self._changed.clear()
                for _ in range(self._places):
                    group.create_task(work())
                self._places = 0
                await self._changed.wait()
        return Tally()

    # -- what the driver says ------------------------------------------------------------------------

    def heard(self, message: Message) -> None:
        match message["do"]:
            case "work":
                self._places += message["places"]
            case "over":
                self._over = True
            case "stop":
                self._stopped = True
            case "range" if "start" in message:
                self._tell(Range(message["start"], message["stop"], message["again"]))
                return
            case "range":
                self._over = True
                self._tell(None)
        self._changed.set()

    def _tell(self, found: Range | None) -> None:
        asked = self._asked.popleft()
        if not asked.done():  # who asked may have been cancelled meanwhile
            asked.set_result(found)


class _Work:
    """Everything that one helper works on."""

    def __init__(self, line: Line, runtime: Runtime) -> None:
        self._line = line
        self._runtime = runtime
        self._loops = Loops(runtime)
        self._shards = InlineShards(runtime)
        self._shares: dict[int, RemoteShare] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @classmethod
    async def until_the_end(cls, settings: Settings, connected: socket.socket) -> None:
        line = await Line.over(connected)
        runtime = await Runtime.open(settings, apply=False)
        work = cls(line, runtime)
        line.send({"do": "ready", "pid": os.getpid()})
        while (message := await line.receive()) is not None and message["do"] != "end":
            work._hear(message)
        await cancel_and_wait(*work._tasks.values())
        await runtime.close()

    def _hear(self, message: Message) -> None:
        number = message["team"]
        if message["do"] == "open":
            share = self._shares[number] = RemoteShare(self._line, number)
            self._tasks[number] = asyncio.create_task(self._work(message, share))
        elif message["do"] == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
        elif number in self._shares:
            self._shares[number].heard(message)

    async def _work(self, message: Message, share: RemoteShare) -> None:
        number = message["team"]
        over: dict[str, Any] = {"do": "over", "team": number}
        tally = Tally()
        try:
            tally = await self._run(message, share)
        except asyncio.CancelledError:
            over["error"] = CANCELLED  # what it had taken is not done, whoever cancelled it
        except BaseException as error:
            over["error"] = repr(error)
        finally:
            del self._shares[number], self._tasks[number]
            self._line.send({**over, "done": tally.done, "failed": tally.failed})

    async def _run(self, message: Message, share: RemoteShare) -> Tally:
        execution = await self._runtime.load(message["execution_id"])
        program = execution.step(message["step"], message["visit"])
        shard = message["shard"]
        activation = await self._loops.activate(execution, program, message["visit"], shard=shard)
        if activation.loop_id != message["loop_id"]:
            raise ExecutionStateError(
                f"the driver works on loop {message['loop_id']}, not {activation.loop_id}"
            )
        try:
            if shard:
                return await self._shards.work(activation, share)
            return await self._loops.work(activation, share)
        finally:
            await self._runtime.buffer.flush()
