"""The connections, stores and tools with which one process runs executions. Opened once, then shared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
from pydantic import ValidationError

from noetl_dagster.engine.helpers import HelperProcesses
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.buffer import EventBuffer, EventWriter
from noetl_dagster.events.catalog import RegisteredPlaybooks
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog, StoredPlaybook
from noetl_dagster.events.queries import NEXT_NODE
from noetl_dagster.events.schema import open_settled_pool
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.assets import Key, Partition
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.tracing import exporter as tracing
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.access.keychain import Keychain
from noetl_dagster.tools.base import Toolbox
from noetl_dagster.worker.chunks import ChunkStreams
from noetl_dagster.worker.command import CommandEvents
from noetl_dagster.worker.execution import Execution, PlaybookProgram
from noetl_dagster.worker.pipeline import Pipeline
from noetl_dagster.worker.program import StepProgram
from noetl_dagster.worker.results import ResultWriter
from noetl_dagster.worker.runner import CommandRunner, Runner
from noetl_dagster.worker.running import ExternalCleanup, Heartbeats
from noetl_dagster.worker.spans import trace_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Source = Callable[[int], Awaitable[StoredPlaybook | None]]


@dataclass(slots=True)
class Runtime:
    """The parts of one process, on one event loop. Open it with :meth:`open`, end it with :meth:`close`."""

    settings: Settings
    pool: asyncpg.Pool
    ids: Snowflake
    log: EventLog
    registered: RegisteredPlaybooks
    buffer: EventBuffer
    results: ResultStore
    box: Toolbox
    keychain: Keychain
    commands: CommandEvents
    heartbeats: Heartbeats
    runner: CommandRunner
    streams: ChunkStreams
    result_writer: ResultWriter
    spark: SparkSessions | None
    dispatcher: Runner | None = None
    helpers: HelperProcesses | None = None
    partition_of: Callable[[Playbook, dict[str, Any]], Partition | None] | None = None
    find_external: Callable[[Key, str | None], Awaitable[dict[str, Any] | None]] | None = None
    _programs: dict[tuple[int, frozenset[tuple[str, str]]], PlaybookProgram] = field(default_factory=dict)

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        spark: Callable[[], SparkSession] | None = None,
        apply: bool = True,
        writer: Callable[[EventLog], EventWriter] | None = None,
    ) -> Runtime:
        """Connects to the services that ``settings`` names and brings the schema up to date.

        Args:
            settings: with every address filled.
            spark: returns the Spark session on first use; default: one made from the settings.
            apply: apply ``schema/*.sql`` first; else wait until the control plane has done so.
            writer: where this process's events go; default: straight into the log.

        Raises:
            ServiceError: the event log cannot be reached.
        """
        assert settings.db_url is not None, "settings without NOETL_DB_URL: fill them with embedded.ensure"
        pool = await open_settled_pool(settings, size=settings.db_pool_size, apply=apply)
        try:
            return await cls._opened(settings, pool, spark, writer)
        except BaseException:
            pool.terminate()
            raise

    @classmethod
    async def _opened(
        cls,
        settings: Settings,
        pool: asyncpg.Pool,
        spark: Callable[[], SparkSession] | None,
        writer: Callable[[EventLog], EventWriter] | None,
    ) -> Runtime:
        ids = Snowflake(await pool.fetchval(NEXT_NODE))
        log = EventLog(pool, ids)
        buffer = EventBuffer(
            writer(log) if writer is not None else log,
            size=settings.event_buffer_size,
            linger=settings.event_buffer_milliseconds / 1000,
        )
        results = ResultStore(settings, pool, ids=ids)
        await results.start()
        own_spark = SparkSessions(settings) if spark is None else None
        box = Toolbox(
            settings=settings,
            results=results,
            credentials=Credentials(settings, pool),
            clients=Clients(settings),
            spark=spark or own_spark.get,  # type: ignore[union-attr]
        )
        commands = CommandEvents(ids)
        heartbeats = Heartbeats(buffer, commands, settings.command_heartbeat_seconds)
        result_writer = ResultWriter(settings, results)
        cleanup = ExternalCleanup(buffer, pool)
        streams = ChunkStreams(buffer, commands, pool)
        pipeline = Pipeline(box, result_writer)
        runner = CommandRunner(box, pipeline, buffer, commands, heartbeats, cleanup, streams)
        return cls(
            settings=settings,
            pool=pool,
            ids=ids,
            log=log,
            registered=RegisteredPlaybooks(pool, ids),
            buffer=buffer,
            results=results,
            box=box,
            keychain=Keychain(box.credentials, box.clients, pool),
            commands=commands,
            heartbeats=heartbeats,
            runner=runner,
            streams=streams,
            result_writer=result_writer,
            spark=own_spark,
        )

    async def close(self) -> None:
        """Commits what is buffered and closes every connection."""
        await self.heartbeats.close()
        await self.buffer.flush()
        if tracing.is_used():
            await asyncio.to_thread(tracing.flush)
        await self.results.close()
        await self.box.clients.close()
        await self.pool.close()
        if self.spark is not None:
            self.spark.stop()

    async def load(self, execution_id: int) -> Execution:
        """Reads an execution from the log.

        Raises:
            ExecutionNotFoundError: the log has no such execution.
        """
        return await self.assemble(await self.state(execution_id))

    async def state(self, execution_id: int, connection: Any = None) -> ExecutionState:
        """Reads the state of an execution; see :meth:`load`."""
        events = await self.log.lifecycle(execution_id, connection=connection)
        if not events:
            raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
        return ExecutionState.fold(execution_id, events)

    async def assemble(self, state: ExecutionState, source: Source | None = None) -> Execution:
        """Makes an execution from its state.

        Args:
            source: returns text and path of a playbook by its catalog id; default: from the log.
        """
        program = await self.program(state, source)
        entries = program.playbook.keychain
        keychain = partial(self.keychain.open, entries) if entries else None
        return Execution(program, state, keychain, trace_of(self.settings, program.playbook, state))

    def event(
        self,
        state: ExecutionState,
        type_: EventType,
        node_name: str,
        node_type: str,
        status: str,
        meta: dict[str, Any],
    ) -> Event:
        """Makes an event of an execution."""
        return Event(
            execution_id=state.execution_id,
            event_id=self.ids.next(),
            event_type=type_,
            node_name=node_name,
            node_type=node_type,
            status=status,
            catalog_id=state.catalog_id,
            parent_execution_id=state.parent_execution_id,
            meta=meta,
        )

    def runner_of(self, program: StepProgram) -> Runner:
        """Returns the runner of a step's commands: this process, or the pool of workers."""
        if self.dispatcher is not None and program.in_pool:
            return self.dispatcher
        return self.runner

    async def program(self, state: ExecutionState, source: Source | None = None) -> PlaybookProgram:
        """Returns the compiled playbook that an execution was started with, also if its file has changed."""
        assert state.catalog_id is not None
        key = (state.catalog_id, frozenset(state.renamed.items()))
        program = self._programs.get(key)
        if program is None:
            found = await (source or self.log.source)(state.catalog_id)
            if found is None:
                raise ExecutionNotFoundError(
                    f"execution {state.execution_id}: its playbook text {state.catalog_id} is not in the catalog"
                )
            program = self._programs[key] = _stored_program(found, state)
        if program.playbook.settled:
            own = program.playbook
            return _program(own.source, own.file, state, workload=state.workload)
        return program


def _stored_program(found: StoredPlaybook, state: ExecutionState) -> PlaybookProgram:
    """Loads the stored model; reads the text only if there is no model that this version understands."""
    file = state.file or "<catalog>"
    if found.model is not None:
        try:
            playbook = Playbook.from_stored(found.model, found.content, file=file, renamed=state.renamed)
        except ValidationError:
            pass
        else:
            return PlaybookProgram(playbook, StepGraph(playbook))
    return _program(found.content, file, state)


def _program(
    text: str, file: str, state: ExecutionState, *, workload: dict[str, Any] | None = None
) -> PlaybookProgram:
    playbook = parse_playbook(text, file=file, workload=workload, renamed=state.renamed)
    return PlaybookProgram(playbook, StepGraph(playbook))
