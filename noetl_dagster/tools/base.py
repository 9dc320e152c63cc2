"""The contract between the pipeline that runs tasks and the tools, and fields that several tools share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError

from noetl_dagster.errors import ErrorKind, ToolError
from noetl_dagster.playbook.assets import Key, Partition
from noetl_dagster.playbook.models import Playbook, Task
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from noetl_dagster.storage.store import ResultStore
    from noetl_dagster.tools.access.clients import Clients
    from noetl_dagster.tools.access.credentials import Credentials


Word = TypeVar("Word", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class RunServices:
    """What the run that drives an execution provides to its steps. Other runs of the process provide others.

    Attributes:
        find_asset: returns the latest value of an asset that no playbook makes, as the log stores a result.
        choose_partition: returns the partition of a child playbook's execution by its workload.
        spark: returns the session of the run's own Spark resource.
        open_pipes: opens a session of Dagster Pipes for a job that a call starts, and yields the variables of its
            environment.
        processes: the number of processes that work on a large loop; 0: the driver decides; None: as configured.
        tool_of: returns the tool of a step's task, in tests; None: that of its kind. Child executions have their own.
    """

    find_asset: Callable[[Key, str | None], Awaitable[dict[str, Any] | None]] | None = None
    choose_partition: Callable[[Playbook, dict[str, Any]], Partition | None] | None = None
    spark: Callable[[], SparkSession] | None = None
    open_pipes: Callable[[ToolCall, JobMessages], AbstractAsyncContextManager[Mapping[str, str]]] | None = None
    processes: int | None = None
    tool_of: Callable[[str, Task], Tool | None] | None = None


NO_RUN = RunServices()
"""Of executions that no Dagster run drives, and of commands in the pool."""


@dataclass(slots=True)
class ToolCall:
    """One call of a tool, with every template rendered.

    Attributes:
        config: the tool's own fields (``url``, ``command``, ``code``, ...) under canonical names.
        input: the task's ``input`` mapping.
        auth: the rendered credential name, mapping, or None.
        scope: the names visible to the task, for tools that pass them on (python's ``context``).
        folder: folder of the playbook file; relative ``script.uri`` and paths start there.
        lenient: the playbook was loaded leniently, so child playbooks are.
        attempt: of a task's policy or of its ``retry``, for templates.
        number: of the call among those of its task in its command, from 1; a command that begins again counts anew.
        owner: the command on whose behalf it is made if that is another one, as the partition's for an item.
        limit: the task's ``spec.timeout``, for tools that start something that has to stop when it ends.
        services: of the run that drives the execution.
    """

    execution_id: int
    step: str
    task: Task
    config: dict[str, Any]
    input: dict[str, Any]
    auth: Any = None
    scope: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "."
    lenient: bool = False
    command_id: str = ""
    attempt: int = 1
    number: int = 1
    owner: str = ""
    limit: asyncio.Timeout | None = None
    services: RunServices = NO_RUN

    def error(self, text: str, kind: ErrorKind = "schema", **fields: Any) -> ToolError:
        """Returns an error that names the tool and the step; ``fields`` are further ones of ``ToolError``."""
        return ToolError(f"{self.task.kind} in step {self.step}: {text}", kind=kind, **fields)

    def word(self, field: str, words: type[Word], default: Word | None = None) -> Word:
        """Returns a field of the config as one of some words; raises ``ToolError`` with all of them for another."""
        value = self.config.get(field)
        try:
            return words(str(default if value in (None, "") else value).strip().lower())
        except ValueError:
            raise self.error(f"{field} {value!r} is unknown; known: {', '.join(words)}") from None


@dataclass(slots=True)
class ToolResult:
    """The result of a tool: ``data``, or ``ref`` if it stored the result itself.

    Attributes:
        details: parts of the envelope that only this tool has, for example ``{"http": {"status": 200}}``.
        admitted: the tool has admitted the data, outside of the event loop.
    """

    data: Any = None
    ref: ResultRef | None = None
    details: dict[str, Any] = field(default_factory=dict)
    admitted: bool = False


class JobMessages(StrEnum):
    """The ways in which messages of an external job return: a file on this machine, or objects of the minio store."""

    FILE = "file"
    OBJECTS = "objects"


Removal = Callable[[], Awaitable[None]]
"""Removes what a call has left outside; may be called twice. Raises ``ToolError`` if that fails."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a call's result that is stored while the rest is still being made.

    Attributes:
        index: 0-based index in the result.
        ref: of its rows: a list or a table.
        position: at which a producer that can seek resumes after it, as JSON.
        more: whether another one follows.
    """

    index: int
    ref: ResultRef
    position: Any = None
    more: bool = True


class ChunkLog(Protocol):
    """Records the chunks of results while their calls run."""

    def wanted(self, call: ToolCall) -> bool:
        """Returns whether a step takes the chunks as they come, so that a small result is recorded too."""

    async def recorded(self, call: ToolCall) -> Sequence[Chunk]:
        """Returns the chunks of the call's result that are in the log, from the first: of a run that did not end."""

    async def record(self, call: ToolCall, *chunks: Chunk) -> None:
        """Writes chunks to the log at once; returns when the steps that take them have room for the next."""


@dataclass(slots=True)
class ToolContext:
    """Resources that the tools of a process share. Clients are opened on first use and closed with the process.

    ``progress`` takes the progress of a call, from any thread and at any rate, for example ``spark stage 3 'save': 4/8
    tasks``. ``spark`` returns the session of this process; see :meth:`spark_of`. ``after`` registers the removal of
    what a call leaves for the next run of its command, until the end of the command is in the log, and ``over`` returns
    whether it is. ``chunks`` records results that are made chunk by chunk.
    """

    settings: Settings
    results: ResultStore
    credentials: Credentials
    clients: Clients
    spark: Callable[[], SparkSession]
    after: Callable[[ToolCall, Removal], None]
    over: Callable[[ToolCall], Awaitable[bool]]
    chunks: ChunkLog
    run_playbook: Callable[[ToolCall], Awaitable[ToolResult]] | None = None
    progress: Callable[[ToolCall, str], None] = lambda call, message: None

    def spark_of(self, services: RunServices) -> Callable[[], SparkSession]:
        """Returns the source of a run's Spark session: the run's own resource, or else that of this process."""
        return services.spark or self.spark


class Tool(Protocol):
    """Runs the calls of a kind."""

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the call.

        Raises:
            ToolError: the tool failed. Any exception that is neither one of the project's errors nor of a connection is
                a defect: the task fails with its type and message.
        """


LOGICAL_PREFIX = "noetl://"


def as_result_ref(value: Any) -> ResultRef | str | None:
    """Returns the reference that a value is, a model or a logical name to look up; None for any other value."""
    if isinstance(value, ResultRef):
        return value
    if isinstance(value, str):
        return value if value.startswith(LOGICAL_PREFIX) else None
    if isinstance(value, Mapping) and "physical_uri" in value and "ref" in value:
        try:
            return ResultRef.model_validate(value)
        except ValidationError:
            return None
    return None


_UNLIMITED = nullcontext()


def time_limit(call: ToolCall, most: float | None = None) -> AbstractAsyncContextManager[None]:
    """Cancels the block after the call's ``timeout`` seconds, if it has one, with a retryable ``ToolError``.

    Args:
        most: the limit of the installation, ``NOETL_PLAYBOOK_SECONDS``. The smaller limit applies.
    """
    own = seconds_of(call)
    if own is None and most is None:
        return _UNLIMITED
    if own is None or (most is not None and most < own):
        assert most is not None
        return _limited(call, most, f"the {most:g} s of NOETL_PLAYBOOK_SECONDS")
    return _limited(call, own, f"its timeout of {own:g} s")


@asynccontextmanager
async def _limited(call: ToolCall, seconds: float, name: str) -> AsyncIterator[None]:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        message = f"{call.task.kind} in step {call.step} took longer than {name}"
        raise ToolError(message, kind="timeout", retryable=True) from None


@asynccontextmanager
async def pipes_variables(
    call: ToolCall, context: ToolContext, default: JobMessages
) -> AsyncIterator[Mapping[str, str]]:
    """Yields the variables by which a job of the call reports to its Dagster run (Dagster Pipes), while it runs.

    There are none without the field ``pipes``, without a Dagster run, and in workers.

    Args:
        default: the channel of ``pipes: true``.

    Raises:
        ToolError: ``pipes`` names no channel.
    """
    asked = call.config.get("pipes")
    try:
        channel = default if asked is True else JobMessages(str(asked)) if asked else None
    except ValueError:
        channels = " or ".join(JobMessages)
        raise call.error(f"pipes is true, {channels}, not {asked!r}") from None
    if channel is None or call.services.open_pipes is None:
        yield {}
        return
    async with call.services.open_pipes(call, channel) as variables:
        yield variables


def seconds_of(call: ToolCall) -> float | None:
    """Returns the ``timeout`` of a call's config; raises ``ToolError`` if it is no number."""
    timeout = call.config.get("timeout")
    try:
        return None if timeout is None else float(timeout)
    except (TypeError, ValueError):
        raise call.error(f"timeout {timeout!r} is no number of seconds") from None


def count_of(call: ToolCall, field: str) -> int | None:
    """Returns a number of rows in a call's config, None if missing or 0; raises ``ToolError`` for other values."""
    value = call.config.get(field)
    if not value:
        return None
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if count < 1:
        raise call.error(f"{field} {value!r} is no number of rows; write a whole number from 1")
    return count
