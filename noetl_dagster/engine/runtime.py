"""The connections, stores and tools with which one process runs executions. Opened once, then shared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from noetl_dagster.engine.helpers import HelperProcesses
from noetl_dagster.errors import ExecutionNotFoundError, ServiceError
from noetl_dagster.events.buffer import GROUP_EVENTS, LINGER_SECONDS, EventBuffer, EventWriter
from noetl_dagster.events.catalog import RegisteredPlaybooks
from noetl_dagster.events.connection import PATIENCE, PatientReads
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog, StoredPlaybook
from noetl_dagster.events.queries import NEXT_NODE
from noetl_dagster.events.schema import open_pool_with_schema
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.process import tracing
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.access.keychain import Keychain
from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult
from noetl_dagster.worker.chunks import ChunkStreams
from noetl_dagster.worker.command import CommandEvents
from noetl_dagster.worker.execution import Execution, PlaybookProgram
from noetl_dagster.worker.program import StepProgram
from noetl_dagster.worker.results import ResultWriter
from noetl_dagster.worker.runner import CommandExecutor, CommandRunner
from noetl_dagster.worker.running import ExternalCleanup, Heartbeats
from noetl_dagster.worker.spans import trace_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


T = TypeVar("T")
Source = Callable[[int], Awaitable[StoredPlaybook | None]]
RunPlaybook = Callable[[ToolCall], Awaitable[ToolResult]]


class Runtime:
    """The parts of one process, on one event loop. :meth:`close` ends them."""

    def __init__(
        self,
        settings: Settings,
        pool: asyncpg.Pool,
        node: int,
        *,
        spark: Callable[[], SparkSession] | None = None,
        writer: Callable[[EventLog], EventWriter] | None = None,
        dispatcher: CommandExecutor | None = None,
        helpers: HelperProcesses | None = None,
        run_playbook: RunPlaybook | None = None,
        worker_id: str | None = None,
        linger: float = LINGER_SECONDS,
    ) -> None:
        """Makes the parts.

        Args:
            settings: with every address filled.
            spark: returns the Spark session on first use; default: one made from the settings.
            writer: where this process's events go; default: straight into the log.
            dispatcher: runs the commands of steps whose tools run in the pool; default: this process does.
            helpers: the processes with which this one shares large loops.
            run_playbook: runs child playbooks; default: the process cannot.
            worker_id: the name of this process in events; default: its host and process id.
            linger: seconds that an event waits for others, which are committed with it.
        """
        self.settings = settings
        self.pool = pool
        self.reads = PatientReads(pool)
        self.ids = ids = Snowflake(node)
        self.log = log = EventLog(pool, ids)
        self.handler = EventHandler(log, settings.command_heartbeat_timeout_seconds)
        self.registered = RegisteredPlaybooks(pool, ids)
        self.buffer = buffer = EventBuffer(
            writer(log) if writer is not None else log,
            size=GROUP_EVENTS,
            linger=linger,
        )
        self.results = ResultStore(settings, pool, ids=ids)
        self.spark = SparkSessions(settings) if spark is None else None
        self.dispatcher, self.helpers = dispatcher, helpers
        self.commands = commands = CommandEvents(ids, worker_id)
        self.heartbeats = heartbeats = Heartbeats(buffer, commands, settings.command_heartbeat_seconds)
        self.streams = streams = ChunkStreams(buffer, commands, pool)
        cleanup = ExternalCleanup(buffer, pool)
        clients = Clients(settings)
        self.tool_context = context = ToolContext(
            settings=settings,
            results=self.results,
            credentials=Credentials(settings, pool, clients),
            clients=clients,
            spark=spark or self.spark.get,  # type: ignore[union-attr]
            run_playbook=run_playbook,
            progress=heartbeats.tell,
            after=cleanup.keep,
            over=cleanup.is_over,
            chunks=streams,
        )
        self.keychain = Keychain(context.credentials)
        self.result_writer = ResultWriter(settings, self.results)
        self.runner = CommandRunner(context, self.result_writer, buffer, commands, heartbeats, cleanup, streams)
        self._programs: dict[tuple[int, frozenset[tuple[str, str]], bool], PlaybookProgram] = {}

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        apply: bool = True,
        writer: Callable[[EventLog], EventWriter] | None = None,
        worker_id: str | None = None,
        linger: float = LINGER_SECONDS,
    ) -> Runtime:
        """Connects to the services of a process that drives no executions; see :func:`connect`.

        Args:
            apply: apply ``schema/*.sql`` first; else wait until the control plane has done so.
            writer: where this process's events go; default: straight into the log.
            worker_id: the name of this process in events.
            linger: seconds that an event waits for others, which are committed with it.
        """

        def make(pool: asyncpg.Pool, node: int) -> Runtime:
            return cls(settings, pool, node, writer=writer, worker_id=worker_id, linger=linger)

        return await connect(settings, make, apply=apply)

    async def close(self) -> None:
        """Commits what is buffered and closes every connection."""
        await self.heartbeats.close()
        await self.runner.cleanup.close()
        await self.buffer.flush()
        if tracing.is_used():
            await asyncio.to_thread(tracing.flush)
        await self.results.close()
        await self.tool_context.clients.close()
        await self.pool.close()
        if self.spark is not None:
            self.spark.stop()

    async def load(self, execution_id: int) -> Execution:
        """Reads an execution from the log, again while the database is away; see :meth:`state`."""

        async def read() -> Execution:
            return await self.assemble(await self.state(execution_id))

        return await with_retries(read, PATIENCE)

    async def state(self, execution_id: int, connection: Any = None) -> ExecutionState:
        """Reads the state of an execution, or raises :class:`ExecutionNotFoundError`."""
        events = await self.log.lifecycle(execution_id, connection=connection)
        if not events:
            raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
        return ExecutionState.fold(execution_id, events)

    async def assemble(self, state: ExecutionState, source: Source | None = None) -> Execution:
        """Makes an execution from its state; ``source`` returns playbooks by catalog id, by default from the log."""
        program = await self.program(state, source)
        entries = program.playbook.keychain
        keychain = partial(self.keychain.open, entries) if entries else None
        return Execution(program, state, keychain, trace_of(self.settings, program.playbook, state))

    def event(
        self, state: ExecutionState, type_: EventType, node: str, kind: str, status: str, meta: dict[str, Any]
    ) -> Event:
        """Makes an event of an execution."""
        return Event(
            execution_id=state.execution_id,
            event_id=self.ids.next(),
            event_type=type_,
            node_name=node,
            node_type=kind,
            status=status,
            catalog_id=state.catalog_id,
            parent_execution_id=state.parent_execution_id,
            meta=meta,
        )

    def runner_of(self, program: StepProgram) -> CommandExecutor:
        """Returns the runner of a step's commands: this process, or the pool of workers."""
        if self.dispatcher is not None and program.in_pool:
            return self.dispatcher
        return self.runner

    async def program(self, state: ExecutionState, source: Source | None = None) -> PlaybookProgram:
        """Returns the compiled playbook that an execution was started with, also if its file has changed."""
        if state.catalog_id is None:
            raise ExecutionNotFoundError(f"execution {state.execution_id}: its start is not in the event log")
        key = (state.catalog_id, frozenset(state.renamed.items()), state.lenient)
        program = self._programs.get(key)
        if program is None:
            stored = await (source or self.log.source)(state.catalog_id)
            if stored is None:
                raise ExecutionNotFoundError(
                    f"execution {state.execution_id}: its playbook text {state.catalog_id} is not in the catalog"
                )
            playbook = parse_playbook(stored.content, model=stored.model, **_fields_of(state))
            program = self._programs[key] = PlaybookProgram(playbook, StepGraph(playbook))
        own = program.playbook
        if own.settled:
            fields = {**_fields_of(state), "workload": state.workload}
            playbook = await asyncio.to_thread(parse_playbook, own.source, **fields)
            return PlaybookProgram(playbook, StepGraph(playbook))
        return program


async def connect(settings: Settings, make: Callable[[asyncpg.Pool, int], T], *, apply: bool = True) -> T:
    """Connects to the event log that ``settings`` names, brings its schema up to date, and makes what works on it.

    Args:
        settings: with every address filled.
        make: gets the pool of connections, and the number of this process for its ids.
        apply: apply ``schema/*.sql`` first; else wait until the control plane has done so.

    Raises:
        ServiceError: the event log cannot be reached.
    """
    if settings.db_url is None:
        raise ServiceError("the event log has no address: set NOETL_DB_URL, or NOETL_EMBEDDED=true")
    pool = await open_pool_with_schema(settings, size=settings.db_pool_size, apply=apply)
    try:
        return make(pool, await pool.fetchval(NEXT_NODE))
    except BaseException:
        pool.terminate()
        raise


def _fields_of(state: ExecutionState) -> dict[str, Any]:
    """Returns what an execution's playbook has from its start, and not from its text."""
    return {"file": state.file or "<catalog>", "renamed": state.renamed, "lenient": state.lenient}
