"""What a worker is told about a command beside the log: the context in its queue row."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from noetl_dagster.result_ref import ResultRef
from noetl_dagster.transport.wire import Id
from noetl_dagster.worker.command import Command


class CommandContext(BaseModel):
    """Everything that makes a command run the same in any process.

    Attributes:
        item: the loop's item, where it is small; else it is stored under ``item_ref``.
        ctx: the ``ctx`` values, where they are newer than the log (sequential loops); else None.
        values: what ``set`` wrote to ``iter`` in earlier attempts of the iteration.
        final: a failure of this command will not be tried again.
        meta: the part of an event's meta that names the command.
    """

    model_config = ConfigDict(frozen=True)

    step: str
    visit: int = 1
    attempt: int = 1
    index: int | None = None
    item: Any = None
    item_ref: ResultRef | None = None
    length: int | None = None
    loop_id: str | None = None
    shard: bool = False
    part: bool = False
    follows: bool = False
    iter_key: str | None = None
    catalog_id: Id | None = None
    parent_execution_id: Id | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    ctx: dict[str, Any] | None = None
    values: dict[str, Any] = Field(default_factory=dict)
    final: bool = True
    meta: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, command: Command, **more: Any) -> CommandContext:
        """The context of a command, without its item."""
        shared = {name: getattr(command, name) for name in _SHARED}
        return cls(**shared, meta=command.meta(), **more)

    def command(self, execution_id: int, item: Any) -> Command:
        """The command, with its item at hand."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return Command(execution_id=execution_id, item=item, **shared)


_SHARED = tuple({field.name for field in fields(Command)} & CommandContext.model_fields.keys() - {"item"})
"""What a context says of its command in the command's own words; an item may be stored elsewhere."""


class Grant(BaseModel):
    """A claimed command.

    Attributes:
        claim: how often it has been claimed, this time included.
        state_version: changes whenever the execution's state does; a worker that knows it need not ask again.
        lease_seconds: the claim lasts so long without a heartbeat.
    """

    model_config = ConfigDict(frozen=True)

    execution_id: Id
    command_id: str
    event_id: Id
    claim: int
    state_version: str
    lease_seconds: float
    context: CommandContext
