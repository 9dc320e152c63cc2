"""A helper process, and the preloaded process that forks it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from noetl_dagster.engine.fanout.shards import work_on_shards
from noetl_dagster.engine.loops.loop import work_on_loop
from noetl_dagster.engine.loops.loop_run import begin_loop
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.sharing import CANCELLED, RemoteItems, SharedLoop, Tally
from noetl_dagster.errors import ExecutionStateError
from noetl_dagster.process import logs
from noetl_dagster.process.environment import withhold_settings
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.forking import AsyncChannel, Message, serve_forks
from noetl_dagster.settings import Settings, load_settings
from noetl_dagster.tools.registry import tool_for

CONNECTIONS = 4
"""Connections to the event log of one helper process, at most."""


class HelperWork:
    """Everything that one helper process works on."""

    def __init__(self, driver: AsyncChannel, runtime: Runtime) -> None:
        self._driver = driver
        self._runtime = runtime
        self._items: dict[int, RemoteItems] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @classmethod
    async def run_until_dismissed(cls, settings: Settings, connected: socket.socket) -> None:
        """Works until the driver ends it, or is gone."""
        driver = await AsyncChannel.over(connected)
        runtime = await Runtime.open(settings, apply=False)
        work = cls(driver, runtime)
        driver.send({"do": "ready", "pid": os.getpid()})
        while (message := await driver.receive()) is not None and message["do"] != "end":
            work.handle(message)
        await work.cancel()
        await runtime.close()

    async def cancel(self) -> None:
        """Cancels all work."""
        await cancel_and_wait(*self._tasks.values())

    def handle(self, message: Message) -> None:
        """Handles a message of the driver."""
        number = message["range"]
        if message["do"] == "open":
            items = self._items[number] = RemoteItems(self._driver, number)
            work = self._work_on(number, SharedLoop(**message["loop"]), items)
            self._tasks[number] = asyncio.create_task(work)
        elif message["do"] == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
        elif number in self._items:
            self._items[number].handle(message)

    async def _work_on(self, number: int, loop: SharedLoop, items: RemoteItems) -> None:
        over: dict[str, Any] = {"do": "over", "range": number}
        tally = Tally()
        try:
            tally = await self._run(loop, items)
        except asyncio.CancelledError:
            over["error"] = CANCELLED  # what it had taken is not done, also when this process ends
        except BaseException as error:
            over["error"] = repr(error)
        finally:
            del self._items[number], self._tasks[number]
            self._driver.send({**over, "done": tally.done, "failed": tally.failed})

    async def _run(self, loop: SharedLoop, items: RemoteItems) -> Tally:
        runtime = self._runtime
        visit = (await runtime.load(loop.execution_id)).visit(loop.step, loop.visit)
        loop_run = await begin_loop(runtime, visit, shard=loop.shard)
        if loop_run.loop_id != loop.loop_id:
            raise ExecutionStateError(f"the driver works on loop {loop.loop_id}, not {loop_run.loop_id}")
        loop_run = replace(loop_run, resumed=loop.resumed)
        try:
            return await (work_on_shards if loop.shard else work_on_loop)(loop_run, items)
        finally:
            await runtime.buffer.flush(loop_run.execution.id)


def prepare(options: Message) -> Callable[[socket.socket], None]:
    """Imports what helper processes need, in the preloaded process; returns what each of them does."""
    settings = load_settings(options["settings"])
    withhold_settings()
    logs.set_up(settings)
    for kind in options["tool_kinds"]:
        tool_for(kind)

    def help_driver(connected: socket.socket) -> None:
        own = {"db_pool_size": min(CONNECTIONS, settings.db_pool_size), "run_processes": 1}
        connected.setblocking(False)
        asyncio.run(HelperWork.run_until_dismissed(settings.model_copy(update=own), connected))

    return help_driver


if __name__ == "__main__":
    serve_forks(prepare)
