"""Targets that have each row once, however often their command is killed and runs again."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from typing import Any

import orjson
from pydantic import BaseModel

from noetl_dagster.tools.transfer.chunks import Transfer, TransferOutcome, TransferSource
from noetl_dagster.tools.transfer.options import Resumable
from noetl_dagster.tools.transfer.postgres_source import PostgresSource

AUTO_BYTES = 256 << 20  # size from which on the rows of a source that can resume are staged for a table
COMMIT_SECONDS = 0.5  # between commits of staged rows with their position, at least
KEY_TYPES = " (whole numbers, text, UUIDs, dates or timestamps)"


class StagedTarget(ABC):
    """A target that has each row once, however often its command is killed and runs again.

    Rows are staged where no reader looks, with the position of the source after them; publishing shows all of them at
    once and records the outcome; the staging is discarded when the end of the command is in the log. Sinks follow
    the same order with the parts of :class:`~noetl_dagster.tools.sinks.place.PartTarget`.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer, self._source = transfer, transfer.source
        self._options, self._call = transfer.options, transfer.call
        self._resumed: int | None = None

    async def run(self) -> TransferOutcome:
        """Stages and publishes the rows, unless an earlier process has done so."""
        async with self.begun() as outcome:
            if outcome is not None:
                return outcome
            await self.stage()
            return await self.publish()

    @abstractmethod
    def begun(self) -> AbstractAsyncContextManager[TransferOutcome | None]:
        """Finds or creates the staging; yields the outcome if an earlier process has published this call."""

    @abstractmethod
    async def stage(self) -> None:
        """Stages the rows after the position; may be killed anywhere and run again. The target is unchanged."""

    @abstractmethod
    async def publish(self) -> TransferOutcome:
        """Shows all staged rows to readers, and records the outcome for a command that runs again."""

    @abstractmethod
    async def discard(self) -> None:
        """Removes the staging; raises ``ToolError`` if the store is unavailable or refuses it."""

    async def _is_unchanged(self, identity: str, after: Any, rows: int) -> bool:
        """Returns whether the source is the one of which ``rows`` rows were staged, up to the position ``after``."""
        if identity != self._source.identity or (rows and after is None):
            return False
        counted = None if after is None else await self._source.rows_until(after)
        return counted is None or counted == rows  # else the rows have changed, or the key is not unique


class TablePosition(BaseModel):
    """The ledger of a command's transfer, in the database of its target.

    Attributes:
        rows, columns, checksum: of the staged rows; ``after`` is the position of the source behind them.
        identity: of the source.
        ended: the number of the last call of the command's task that has published, with its outcome. An earlier call
            does not publish again when the command runs again, nor resume the rows of a later one.
    """

    rows: int = 0
    after: Any = None
    columns: list[str] = []
    checksum: str = "0:0"
    identity: str = ""
    ended: int = 0
    outcome: dict[str, Any] | None = None


class StagedTable(StagedTarget):
    """A table of a database that keeps a :class:`TablePosition` in it, under the digest of the command.

    The position changes in the transactions that write the rows. Only one process at a time writes for a command.

    Args:
        lasting: rows are staged chunk by chunk; else one transaction copies all of them and records the outcome.
    """

    def __init__(self, transfer: Transfer, *, lasting: bool) -> None:
        super().__init__(transfer)
        call, target = transfer.call, transfer.target
        command, _, attempt = call.command_id.rpartition(":")
        words = [call.task.name, call.config.get("source"), target.table, transfer.options.mode, target.key]
        self._of_all_attempts = digest_of([call.execution_id, command, *words])
        self._digest = digest_of([call.execution_id, command, attempt, *words])
        self._lasting = lasting
        self._position = TablePosition(identity=self._source.identity)

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[TransferOutcome | None]:
        """Waits until no other process transfers for the command: one that is assumed dead may still run."""
        async with self._alone():
            state = await self._found()
            if state is not None and state.outcome is not None and self._call.number <= state.ended:
                yield TransferOutcome(**state.outcome)
                return
            if state is not None and self._lasting and await self._fits(state):
                self._position, self._resumed = state, state.rows
            else:
                if state is not None:
                    self._position.ended, self._position.outcome = state.ended, state.outcome
                if self._lasting:
                    await self._create()
            yield None

    @abstractmethod
    def _alone(self) -> AbstractAsyncContextManager[None]:
        """Keeps other processes of the command away from the target."""

    @abstractmethod
    async def _found(self) -> TablePosition | None:
        """Returns the position that an earlier process or call has recorded."""

    @abstractmethod
    async def _fits(self, position: TablePosition) -> bool:
        """Returns whether the staging is complete up to a position, and the source the same as then."""

    @abstractmethod
    async def _create(self) -> None:
        """Creates an empty staging at the position."""

    async def _end(self, outcome: TransferOutcome) -> TablePosition:
        """Returns the position of the published call.

        Called in the transaction that publishes, as its last statement but the one that records the position.

        Raises:
            ToolError: another process has ended the command, so that this one is too late.
        """
        await refuse_if_over(self._transfer)
        outcome.resumed = self._resumed
        return self._position.model_copy(update={"ended": self._call.number, "outcome": asdict(outcome)})


async def refuse_if_over(transfer: Transfer) -> None:
    """Raises ``ToolError`` if another process has ended the command, or has run it again to its end."""
    call = transfer.call
    if await transfer.tool_context.over(call):
        raise call.error("another process has ended the command; this one comes too late and writes nothing", "claim")


def seeks_by_row(source: TransferSource) -> bool:
    """Returns whether all chunks of a source have positions, not only bytes of COPY."""
    return source.seeks and not (isinstance(source, PostgresSource) and not source.seeks_by_row)


def can_resume(transfer: Transfer, *, seeks: bool, columns: str = "") -> bool:
    """Returns whether rows may be staged for a later run of the command.

    Args:
        seeks: the source can resume at the positions that the target records; else ``resumable: true`` is an error.
        columns: the columns by which the source can do so, for the error.
    """
    if transfer.options.resumable is Resumable.TRUE and not seeks:
        raise transfer.call.error(
            "resumable: true needs a source that can go on in the middle; name unique columns in source.order_by"
            f"{columns}, or of http write source.paging"
        )
    return seeks and transfer.options.resumable is not Resumable.FALSE


def digest_of(words: list[Any]) -> str:
    """Returns a digest of JSON values, for the name of a staging."""
    text = orjson.dumps(words, default=str, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=8).hexdigest()
