"""The context of a command in its queue row: the data that a worker needs beside the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from noetl_dagster.events.transport.wire import EventMessage, Id, kept_event
from noetl_dagster.events.types import Event
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.worker.command import Command

MOST_AT_ONCE = 1_000
"""Commands in one claim, or given back at once."""


class CommandContext(BaseModel, frozen=True):
    """Everything that makes a command run the same in any process.

    Attributes:
        step: name of the step.
        visit: number of the visit of the step, from 1.
        attempt: number of the attempt, from 1.
        index: position of the item, from 0; null outside loops.
        item: the loop's item, where it is small; else it is stored under ``item_ref``.
        item_ref: the stored item.
        length: number of items of the loop; null if it is not known.
        loop_id: identifies the loop of this visit.
        shard: the command is a shard of a fan-out.
        part: one of several commands of a shard, whose end is an event of its own after the last of them.
        follows: it comes after an attempt that succeeded: the next page, or the next poll.
        iter_key: the key of a shard in its results.
        catalog_id: the text of the playbook, in the catalog.
        parent_execution_id: the execution that started this one.
        overrides: changed parts of the call, for paginated requests.
        ctx: the ``ctx`` values, where they are newer than the log (sequential loops); else None.
        values: values that ``set`` wrote to ``iter`` in earlier attempts of the iteration.
        final: a failure of this command will not be tried again.
        meta: the part of an event's meta that names the command.
    """

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

    def command(self, execution_id: int, item: Any, claim: int | None = None) -> Command:
        """Makes the command with its item, as held by a claim."""
        named = {name: getattr(self, name) for name in _NAMED}
        return Command(execution_id=execution_id, item=item, claim=claim, **named)


_NAMED = tuple({field.name for field in fields(Command)} & CommandContext.model_fields.keys() - {"item"})
"""Fields that a context and its command have in common; an item may be stored elsewhere."""


class Shared(NamedTuple):
    """The part of a context that the commands of a loop have in common. Fields as in :class:`CommandContext`."""

    step: str
    visit: int
    length: int | None
    loop_id: str | None
    shard: bool
    part: bool
    catalog_id: int | None
    parent_execution_id: int | None
    final: bool

    @classmethod
    def of(cls, command: Command, *, final: bool = True) -> Shared:
        """Returns the shared part of a command's context."""
        return cls._make((*_SHARED_FIELDS(command), final))

    def context(self) -> dict[str, Any]:
        """Returns JSON, without default values."""
        context = {name: value for name, value in self._asdict().items() if value != _DEFAULTS[name]}
        for name in ("catalog_id", "parent_execution_id"):
            if name in context:
                context[name] = str(context[name])
        return context


_SHARED_FIELDS = attrgetter(*Shared._fields[:-1])
_DEFAULTS = {name: CommandContext.model_fields[name].get_default() for name in Shared._fields}


def own_context(command: Command, **more: Any) -> dict[str, Any]:
    """Returns the part of a context that is a command's own, as JSON. ``more`` may have its item, values and ctx."""
    context: dict[str, Any] = {"attempt": command.attempt, "meta": command.meta(), **more}
    for name in ("index", "iter_key"):
        if (value := getattr(command, name)) is not None:
            context[name] = value
    for name in ("follows", "overrides"):
        if value := getattr(command, name):
            context[name] = value
    return context


class Grant(BaseModel, frozen=True):
    """A claimed command.

    Attributes:
        command_id: the command.
        claim: how often it has been claimed, this time included.
        state_version: changes whenever the execution's state does. A worker that knows it need not ask again.
        lease_seconds: for how long the claim holds without a heartbeat.
        context: everything that the worker needs to run it.
    """

    execution_id: Id
    command_id: str
    event_id: Id
    claim: int
    state_version: str
    lease_seconds: float
    context: CommandContext


class ClaimedCommand(BaseModel):
    """One command of a batch.

    Attributes:
        command_id: the command.
        claim: how often it has been claimed, this time included.
        context: replaces what its group shares, field by field.
    """

    command_id: str
    event_id: Id
    claim_event_id: Id
    claim: int
    context: dict[str, Any]


class ClaimedGroup(BaseModel):
    """Commands of a step that have most of their contexts in common. ``state_version`` as in :class:`Grant`."""

    execution_id: Id
    tool_kind: str
    state_version: str
    shared: dict[str, Any]
    commands: list[ClaimedCommand]


class Batch(BaseModel):
    """The commands that one claim of a worker returned.

    Attributes:
        states: events of the executions whose versions the worker does not know yet; their states are folded from them.
    """

    lease_seconds: float
    groups: list[ClaimedGroup]
    states: dict[Id, list[EventMessage]] = Field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(group.commands) for group in self.groups)

    def execution_states(self) -> Iterator[tuple[int, str, list[Event]]]:
        """Yields id, version and events of the executions whose states came with the answer."""
        versions = {group.execution_id: group.state_version for group in self.groups}
        for execution_id, messages in self.states.items():
            yield execution_id, versions[execution_id], [kept_event(message) for message in messages]

    def grants(self) -> Iterator[tuple[str, int, Grant]]:
        """Yields tool kind, id of the ``command.claimed`` event and grant of each command, group by group."""
        for group in self.groups:
            for one in group.commands:
                grant = Grant(
                    execution_id=group.execution_id,
                    command_id=one.command_id,
                    event_id=one.event_id,
                    claim=one.claim,
                    state_version=group.state_version,
                    lease_seconds=self.lease_seconds,
                    context=CommandContext.model_validate(group.shared | one.context),
                )
                yield group.tool_kind, one.claim_event_id, grant
