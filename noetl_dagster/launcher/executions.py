"""Executions of the API, which a run server drives."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.runners import Runner, check_runner
from noetl_dagster.engine.recovery.abandoned import Abandoned
from noetl_dagster.errors import ServiceError
from noetl_dagster.launcher.address import Address, Message, execute_request
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.private_files import private_file
from noetl_dagster.process.environment import own_environment, without_tokens
from noetl_dagster.process.event_loop import cancel_and_wait

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
TAIL_BYTES = 2_000

MOST_FAILURES = 1_000
"""Executions whose latest error a launcher keeps."""


class WarmLauncher:
    """Lets a run server drive executions that are in the log. They continue when the service ends.

    A server that is gone is started again and receives the executions that have not ended. If none starts, each
    execution gets a process of its own.

    Args:
        environment: of the runs, with ``NOETL_*`` and ``DAGSTER_HOME``.
    """

    def __init__(self, engine: Engine, address: Address, environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._address = address
        self._fallback = ProcessLauncher(engine, environment)
        self._failures = self._fallback.failures
        self._pending: dict[str, tuple[Message, Playbook]] = {}
        self._writer: asyncio.StreamWriter | None = None
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
        """Hands an execution to the run server."""
        given: dict[str, Any] = {"priority": priority, "resumed": resumed, "runner": runner}
        await self._hand_over(
            playbook, execute_request(playbook.file, execution_id, workload, lenient=playbook.lenient, **given)
        )

    async def recover(self, playbook: Playbook, abandoned: Abandoned) -> None:
        """Lets a run of its own resume an execution without a process."""
        given: dict[str, Any] = {"resumed": True, "epoch": abandoned.epoch}
        await self._hand_over(
            playbook, execute_request(playbook.file, abandoned.execution_id, {}, lenient=playbook.lenient, **given)
        )

    async def _hand_over(self, playbook: Playbook, message: Message) -> None:
        execution_id = int(message["id"])
        self._failures.pop(execution_id, None)
        # while it waits, this process holds it: recovery leaves it alone
        await self._engine.liveness.hold(execution_id)
        self._pending[str(execution_id)] = message, playbook
        if self._writer is not None:
            self._send(message)
        else:
            await self.connect()  # which sends all that is pending

    def failure(self, execution_id: int) -> str | None:
        """Returns the error of the latest run of an execution that this process launched."""
        return self._failures.get(execution_id)

    @property
    def running(self) -> int:
        """The number of executions that were handed over and have not ended."""
        return len(self._pending) + self._fallback.running

    async def connect(self, *, after: float = 0.0) -> None:
        """Connects to the run server and submits what is pending; without a server, each execution gets a process."""
        await asyncio.sleep(after)
        async with self._connecting:
            if self._writer is not None:
                return
            try:
                channel = await asyncio.to_thread(self._address.open)
            except (ServiceError, OSError) as error:
                await self._launch_without_server(str(error))
                return
            reader, self._writer = await asyncio.open_unix_connection(sock=channel.sock)
            for message, _ in self._pending.values():
                self._send(message)
            self._reading = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """Disconnects; the runs continue."""
        self._closing = True
        if self._reading is not None:
            await cancel_and_wait(self._reading)
        if self._writer is not None:
            self._writer.close()
        await cancel_and_wait(*self._tasks)
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
                    self._start_task(self._release(int(message["ended"]), message["error"]))
                elif "refused" in message:
                    refused = message["error"]
        except (OSError, ValueError) as error:
            # ValueError: a line that is cut off, or longer than any of ours
            logger.warning("the run server is gone: %s", error)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if refused:
            await self._launch_without_server(refused)
        elif self._pending and not self._closing:
            logger.warning("the run server ended with %d executions; another takes them", self.running)
            self._start_task(self.connect(after=RETRY_SECONDS))

    async def _launch_without_server(self, why: str) -> None:
        logger.error("executions get processes of their own: %s", why)
        pending, self._pending = self._pending, {}
        for message, playbook in pending.values():
            if self._fallback.running < self._address.runs_at_once:
                await self._launch_alone(message, playbook)
            else:  # a thousand processes at once would exhaust the machine
                self._start_task(self._launch_later(message, playbook))

    async def _launch_later(self, message: Message, playbook: Playbook) -> None:
        while self._fallback.running >= self._address.runs_at_once:  # noqa: ASYNC110, no event reports the end of processes
            await asyncio.sleep(RETRY_SECONDS)
        try:
            await self._launch_alone(message, playbook)
        except OSError as error:
            await self._release(int(message["id"]), str(error))

    async def _launch_alone(self, message: Message, playbook: Playbook) -> None:
        execution_id = int(message["id"])
        await self._fallback.launch(playbook, execution_id, message["workload"], resumed=message["resumed"])
        await self._engine.liveness.release(execution_id)

    async def _release(self, execution_id: int, error: str | None) -> None:
        """Releases an execution; fails it if its run ended before it started."""
        await self._engine.liveness.release(execution_id)
        if error:
            await _fail_unstarted(self._engine, execution_id, error)
            remember_failure(self._failures, execution_id, error)

    def _start_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ProcessLauncher:
    """Runs ``noetl-dagster run`` for each execution, with this environment. Runs continue when the service ends."""

    def __init__(self, engine: Engine, environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._environment = dict(environment)
        self.failures: dict[int, str] = {}
        self._watching: set[asyncio.Task[None]] = set()

    async def launch(
        self, playbook: Playbook, execution_id: int, workload: dict[str, Any], *, resumed: bool = False
    ) -> None:
        """Starts the process, and returns without waiting for it."""
        self.failures.pop(execution_id, None)
        with tempfile.NamedTemporaryFile(prefix=f"noetl-{execution_id}-", suffix=".json", delete=False) as payload:
            payload.write(orjson.dumps(workload))
        log = Path(payload.name).with_suffix(".log")
        command = ["resume", str(execution_id), "--json"]
        if not resumed:
            command = ["run", playbook.file, "--json", "--payload", payload.name, "--execution-id", str(execution_id)]
            command += ["--lenient"] if playbook.lenient else []
        with open(log, "xb", opener=private_file) as output:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "noetl_dagster", *command),
                env=without_tokens({**own_environment(), **self._environment}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )
        task = asyncio.create_task(self._watch(process, execution_id, [Path(payload.name), log]))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def failure(self, execution_id: int) -> str | None:
        """Returns the error of the latest run of an execution that this process launched."""
        return self.failures.get(execution_id)

    @property
    def running(self) -> int:
        """Number of started processes that have not ended."""
        return len(self._watching)

    async def close(self) -> None:
        """Stops watching; the runs are processes of their own."""
        await cancel_and_wait(*self._watching)

    async def _watch(self, process: asyncio.subprocess.Process, execution_id: int, files: list[Path]) -> None:
        """Fails the execution if its process ended before the run began."""
        code = await process.wait()
        output_tail = files[-1].read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        for file in files:
            file.unlink(missing_ok=True)
        if code == 0:
            return
        await _fail_unstarted(self._engine, execution_id, output_tail)
        remember_failure(self.failures, execution_id, output_tail)


def remember_failure(failures: dict[int, str], execution_id: int, error: str) -> None:
    """Keeps the error of a run for those who wait for it; of :data:`MOST_FAILURES` executions at most."""
    failures[execution_id] = error[-TAIL_BYTES:]
    while len(failures) > MOST_FAILURES:
        failures.pop(next(iter(failures)))


async def _fail_unstarted(engine: Engine, execution_id: int, why: str) -> None:
    if await engine.lifecycle.fail_unstarted(execution_id, f"the run did not start: {why}"):
        logger.error("execution %d did not start: %s", execution_id, why)
