"""Helper processes: forked from a preloaded process, they run iterations of large loops beside the driver.

Driver and helper processes take ranges of a loop's items in turn, run their commands and write their events. Routing
stays with the driver. The items of a helper process that is gone go back to the others; the log knows which are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noetl_dagster import machine
from noetl_dagster.engine.sharing import (
    CANCELLED,
    Helper,
    ItemSource,
    SharedItems,
    SharedLoop,
    Tally,
)
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.forking import ForkServer, Message
from noetl_dagster.process.logs import without_fields
from noetl_dagster.settings import Settings, dump_settings

logger = logging.getLogger(__name__)

PRELOADED_MODULE = "noetl_dagster.engine.helper"
"""Runs as the preloaded process: it imports all that helper processes need, and forks them."""

LOOK_SECONDS = 0.25
BUSY_SHARE = 0.7
BUSY_LOOKS = 3
"""After this many looks in a row at which this process wanted more than this share of a core, helpers are started."""

IDLE_SECONDS = 30.0
"""Helper processes without work for this long are ended."""

CLOSE_SECONDS = 10.0


class HelperProcesses:
    """Starts and ends the helper processes of this process. Lives on this process's event loop.

    The number of processes that work on a loop, this one included, is that of the execution's run, or else the
    settings'. With 0 this process decides: as many as there are cores, once it has been busy for a moment.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[int, SharedItems] = {}
        self._chosen: set[int] = set()  # ranges whose run has chosen the number of processes
        self._helpers: set[Helper] = set()
        self._preloaded: ForkServer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._broken = False
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the helper processes that live."""
        return [helper.pid for helper in self._helpers if helper.pid is not None]

    @contextmanager
    def share(
        self, loop: SharedLoop, start: int, stop: int, slots: int, processes: int | None = None
    ) -> Iterator[ItemSource]:
        """Shares the items ``start <= index < stop`` until the block ends, ``slots`` of them at the same time.

        Args:
            processes: that the run has chosen; 0: this process decides; None: as configured.
        """
        wanted = processes or self._settings.run_processes or machine.processes()
        if slots < 2 or stop - start < 2 or wanted == 1 or self._broken:
            yield SharedItems(loop, start, stop, slots)
            return
        items = SharedItems(loop, start, stop, slots, wanted)
        self._open[items.number] = items
        if processes:
            self._chosen.add(items.number)
        for helper in self._helpers:
            items.add_helper(helper, wanted, at_once=True)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), context=without_fields())
        try:
            yield items
        finally:
            del self._open[items.number]
            self._chosen.discard(items.number)

    async def close(self) -> None:
        """Ends the helper processes."""
        await cancel_and_wait(*(task for task in (self._watching, self._starting) if task is not None))
        await self._dismiss()

    async def _watch(self) -> None:
        """Starts helper processes when there is work for them, and ends them when there is none."""
        busy, idle_since = 0, time.monotonic()
        before, cpu = time.monotonic(), _wanted_cpu()
        while self._open or self._helpers:
            is_configured = self._chosen or (self._open and self._settings.run_processes > 1)
            if not self._serving and is_configured:
                busy = BUSY_LOOKS  # the number of processes is configured
            if busy >= BUSY_LOOKS and (self._starting is None or self._starting.done()):
                self._starting = asyncio.create_task(self._start())
                await asyncio.wait({self._starting})
                busy = 0
            await asyncio.sleep(LOOK_SECONDS)
            now, used = time.monotonic(), _wanted_cpu()
            busy = busy + 1 if self._open and used - cpu > BUSY_SHARE * (now - before) else 0
            before, cpu = now, used
            if self._open:
                idle_since = now
            elif now - idle_since > IDLE_SECONDS:
                await self._dismiss()

    async def _start(self) -> None:
        """Starts the helper processes that are missing."""
        if not self._open or self._broken:
            return
        processes = max(items.processes for items in self._open.values())
        missing = processes - 1 - len(self._serving)
        if missing <= 0:
            return
        kinds = sorted({kind for items in self._open.values() for kind in items.loop.tool_kinds})
        try:
            if self._preloaded is not None and not self._preloaded.is_alive:
                self._preloaded.close()
                self._preloaded = None
            if self._preloaded is None:
                shared_settings = self._settings.model_copy(update={"service_tokens": None, "server_token": None})
                options = {"settings": dump_settings(shared_settings), "tool_kinds": kinds}
                self._preloaded = ForkServer(PRELOADED_MODULE, options)
            for _ in range(missing):
                helper = await Helper.over(self._preloaded.fork())
                task = asyncio.create_task(self._serve(helper), context=without_fields())
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)
        except OSError as error:
            self._broken = True
            logger.warning("this run works in one process: its helpers cannot be started: %s", error)

    async def _serve(self, helper: Helper) -> None:
        """Answers a helper process until it is gone; its items then go to others."""
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
            for items in self._open.values():
                items.helper_ended(helper, Tally(), well=False)

    def _answer(self, helper: Helper, message: Message) -> None:
        if message["do"] == "ready":
            helper.pid = message["pid"]
            self._helpers.add(helper)
            for open_items in self._open.values():
                open_items.add_helper(helper, open_items.processes, at_once=False)
            return
        if (items := self._open.get(message["range"])) is None:
            return
        match message["do"]:
            case "take":
                items.send_items(helper)
            case "failed":
                items.stop()
            case "over":
                error = message.get("error")
                if error not in (None, CANCELLED):
                    logger.warning("helper %s left step %s: %s", helper.pid, items.loop.step, error)
                tally = Tally(message["done"], message["failed"])
                items.helper_ended(helper, tally, well=error is None)

    async def _dismiss(self) -> None:
        self._closing = True
        for helper in list(self._helpers):
            helper.send({"do": "end"})
        if self._serving and self._helpers:
            await asyncio.wait(self._serving, timeout=CLOSE_SECONDS)
        if self._preloaded is not None:
            self._preloaded.close()
            self._preloaded = None
        await cancel_and_wait(*self._serving)
        self._closing = False


def _wanted_cpu() -> float:
    """Returns the seconds for which this process has run or, on a busy machine, waited for a core."""
    waited = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            waited += int(thread.read_text().split()[1])
    return time.process_time() + waited / 1e9
