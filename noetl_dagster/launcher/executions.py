"""Executions of the API, which a run server drives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.runners import Runner, check_runner
from noetl_dagster.engine.recovery.abandoned import Abandoned
from noetl_dagster.errors import LaunchError, ServiceError
from noetl_dagster.launcher.address import Address, execute_request
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.forking import AsyncChannel, Message

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
TAIL_CHARACTERS = 2_000

MOST_FAILURES = 1_000
"""Executions whose latest error a launcher keeps."""


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request to drive an execution that has not ended.

    Attributes:
        refusal: why no run server received it.
    """

    message: Message
    refusal: str = ""


class WarmLauncher:
    """Lets a run server drive executions that are in the log. They continue when the service ends.

    A server that is gone is started again and receives the executions that have not ended. If none starts, recovery
    resumes them.
    """

    def __init__(self, engine: Engine, address: Address) -> None:
        self._engine = engine
        self._address = address
        self._failures: dict[int, str] = {}
        self._pending: dict[str, PendingRequest] = {}
        self._server: AsyncChannel | None = None
        self._connecting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def check(self, playbook: Playbook, runner: Runner = Runner.DAGSTER) -> None:
        """Accepts every playbook that loads, unless it needs a run and gets none."""
        check_runner(playbook, runner)

    async def cancelled(self, playbook: str, execution_id: int) -> None:
        """Does nothing: the driver of the execution reads the cancellation in the log."""

    async def launch(
        self,
        playbook: Playbook,
        execution_id: int,
        workload: dict[str, Any],
        priority: int = 0,
        runner: Runner = Runner.DAGSTER,
        *,
        resumed: bool = False,
    ) -> None:
        """Hands an execution to the run server.

        Raises:
            LaunchError: no run server starts; the message has the end of its log.
        """
        options: dict[str, Any] = {"priority": priority, "resumed": resumed, "runner": runner}
        await self._hand_over(
            execute_request(playbook.file, execution_id, workload, lenient=playbook.lenient, **options)
        )

    async def recover(self, playbook: Playbook, abandoned: Abandoned) -> None:
        """Lets a run of its own resume an execution without a process.

        Raises:
            LaunchError: no run server starts.
        """
        options: dict[str, Any] = {"resumed": True, "epoch": abandoned.epoch}
        await self._hand_over(
            execute_request(playbook.file, abandoned.execution_id, {}, lenient=playbook.lenient, **options)
        )

    async def _hand_over(self, message: Message) -> None:
        execution_id = int(message["id"])
        self._failures.pop(execution_id, None)
        # while it waits, this process holds it: recovery leaves it alone
        await self._engine.liveness.hold(execution_id)
        request = self._pending[message["id"]] = PendingRequest(message)
        if self._server is not None:
            self._server.send(message)
            return
        async with self._connecting:
            if self._server is None and not request.refusal:
                await self._connect()  # sends all that is pending
        if request.refusal:
            raise LaunchError(request.refusal)

    def failure(self, execution_id: int) -> str | None:
        """Returns the error of the latest run of an execution that this process launched."""
        return self._failures.get(execution_id)

    @property
    def running(self) -> int:
        """The number of executions that were handed over and have not ended."""
        return len(self._pending)

    async def connect(self, *, after: float = 0.0) -> None:
        """Connects to the run server, which is started if it does not run, and submits what is pending."""
        await asyncio.sleep(after)
        async with self._connecting:
            if self._server is None:
                await self._connect()

    async def close(self) -> None:
        """Disconnects; the runs continue."""
        self._closing = True
        if self._reading is not None:
            await cancel_and_wait(self._reading)
        if self._server is not None:
            self._server.close()
        await cancel_and_wait(*self._tasks)

    async def _connect(self) -> None:
        try:
            channel = await asyncio.to_thread(self._address.open)
        except ServiceError as error:
            await self._refuse_pending(str(error))
            return
        self._server = await AsyncChannel.over(channel.sock)
        for request in self._pending.values():
            self._server.send(request.message)
        self._reading = asyncio.create_task(self._read(self._server))

    async def _read(self, server: AsyncChannel) -> None:
        refusal = ""
        while (message := await server.receive()) is not None:
            if "ended" in message:
                self._pending.pop(message["ended"], None)
                self._start_task(self._release(int(message["ended"]), message["error"]))
            elif "refused" in message:
                refusal = message["error"]
        server.close()
        self._server = None
        if refusal:
            await self._refuse_pending(refusal)
        elif self._pending and not self._closing:
            logger.warning("the run server ended with %d executions; another takes them", self.running)
            self._start_task(self.connect(after=RETRY_SECONDS))

    async def _refuse_pending(self, why: str) -> None:
        """Releases the executions that no run server receives, so that recovery resumes them."""
        logger.error("%s; recovery resumes %d executions", why, len(self._pending))
        refused, self._pending = self._pending, {}
        for request in refused.values():
            request.refusal = why
            execution_id = int(request.message["id"])
            self._remember_failure(execution_id, why)
            await self._engine.liveness.release(execution_id)

    async def _release(self, execution_id: int, error: str | None) -> None:
        """Releases an execution; fails it if its run ended before it started."""
        await self._engine.liveness.release(execution_id)
        if not error:
            return
        if await self._engine.lifecycle.fail_unstarted(execution_id, f"the run did not start: {error}"):
            logger.error("execution %d did not start: %s", execution_id, error)
        self._remember_failure(execution_id, error)

    def _remember_failure(self, execution_id: int, error: str) -> None:
        self._failures[execution_id] = error[-TAIL_CHARACTERS:]
        while len(self._failures) > MOST_FAILURES:
            self._failures.pop(next(iter(self._failures)))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
