"""The API's launcher: hands executions to a run server, and hears how they go."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

import orjson

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ServiceError
from noetl_dagster.launcher.address import Address, Message
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.service.launching import ProcessLauncher

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0


class WarmLauncher:
    """Has a run server drive executions that are in the log. They go on when the service ends.

    A server that is gone is started again and gets what it had been given and not ended; where none starts, each
    execution gets a process of its own.

    Args:
        environment: ``NOETL_*`` and ``DAGSTER_HOME`` of the runs, and everything else that they are to have.
    """

    def __init__(self, engine: Engine, address: Address, environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._address = address
        self._fallback = ProcessLauncher(engine, environment)
        self._pending: dict[str, tuple[Message, Playbook]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._ended: set[asyncio.Task[None]] = set()
        self._closing = False

    async def check(self, playbook: Playbook) -> None:
        """Every playbook that loads can be launched."""

    async def cancelled(self, playbook: str, execution_id: int) -> None:
        """Nothing: the process that drives the execution hears of it from the log."""

    async def launch(
        self, playbook: Playbook, execution_id: int, workload: dict[str, Any], priority: int = 0
    ) -> None:
        message = {
            "do": "execute",
            "id": str(execution_id),
            "execution_id": str(execution_id),
            "run_id": str(uuid.uuid4()),
            "file": playbook.file,
            "workload": workload,
            "priority": priority,
        }
        # what waits has a process that answers for it: recovery leaves it alone
        await self._engine.liveness.hold(execution_id)
        self._pending[str(execution_id)] = message, playbook
        if self._writer is not None:
            self._send(message)
        else:
            await self.connect()  # which sends all that is pending

    @property
    def running(self) -> int:
        """Executions that were handed over and have not ended."""
        return len(self._pending) + self._fallback.running

    async def connect(self) -> None:
        """Starts the run server when it does not run; where it does not start, what is pending goes on without."""
        async with self._connecting:
            if self._writer is not None:
                return
            try:
                channel = await asyncio.to_thread(self._address.open)
            except (ServiceError, OSError) as error:
                await self._go_without(str(error))
                return
            reader, self._writer = await asyncio.open_unix_connection(sock=channel.sock)
            for message, _ in self._pending.values():
                self._send(message)
            self._reading = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """Stops listening; the runs go on."""
        self._closing = True
        if self._reading is not None:
            await cancel_and_wait(self._reading)
        if self._writer is not None:
            self._writer.close()
        await cancel_and_wait(*self._ended)
        await self._fallback.close()

    def _send(self, message: Message) -> None:
        assert self._writer is not None
        self._writer.write(orjson.dumps(message) + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        refused = ""
        try:
            while line := await reader.readline():
                message = orjson.loads(line)
                if "ended" in message:
                    self._pending.pop(message["ended"], None)
                    self._begin(self._end(int(message["ended"]), message["error"]))
                elif "refused" in message:
                    refused = message["error"]
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: a line that is cut off, or longer than any of ours
            logger.warning("the run server is gone: %s", error)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if refused:
            await self._go_without(refused)
        elif self._pending and not self._closing:
            logger.warning(
                "the run server ended with %d executions in hand; another takes them", self.running
            )
            self._begin(self._connect_again())

    async def _connect_again(self) -> None:
        await asyncio.sleep(AGAIN_SECONDS)
        await self.connect()

    async def _go_without(self, why: str) -> None:
        logger.error("executions get processes of their own: %s", why)
        pending, self._pending = self._pending, {}
        for message, playbook in pending.values():
            if self._fallback.running < self._address.runs_at_once:
                await self._launch_alone(message, playbook)
            else:  # a thousand processes at once would be the end of the machine
                self._begin(self._launch_later(message, playbook))

    async def _launch_later(self, message: Message, playbook: Playbook) -> None:
        while self._fallback.running >= self._address.runs_at_once:  # noqa: ASYNC110, processes end unheard
            await asyncio.sleep(AGAIN_SECONDS)
        try:
            await self._launch_alone(message, playbook)
        except OSError as error:
            await self._end(int(message["execution_id"]), str(error))

    async def _launch_alone(self, message: Message, playbook: Playbook) -> None:
        execution_id = int(message["execution_id"])
        await self._fallback.launch(playbook, execution_id, message["workload"])
        await self._engine.liveness.release(execution_id)

    async def _end(self, execution_id: int, error: str | None) -> None:
        """Lets go of an execution; one whose run ended before it began is ended too."""
        await self._engine.liveness.release(execution_id)
        if not error:
            return
        execution = await self._engine.runtime.load(execution_id)
        if execution.state.is_running and execution.state.run_id is None:
            logger.error("execution %d did not start: %s", execution_id, error)
            await self._engine.lifecycle.fail(execution, f"the run did not start: {error}")

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)
