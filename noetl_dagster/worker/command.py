"""A command: one call of a step's tasks, and its events."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from noetl_dagster.errors import ToolError
from noetl_dagster.events.envelopes import OK, Envelope, error_envelope, from_result, to_result
from noetl_dagster.events.ids import Snowflake, command_id
from noetl_dagster.events.types import Event, EventType

if TYPE_CHECKING:
    from noetl_dagster.tools.sinks.place import PartPlace

_HOST = socket.gethostname()
CURRENT_ITEM_BYTES = 10_240
"""Items whose JSON is larger are not copied into events; they are read from the collection."""


def own_worker_id() -> str:
    """Returns the id of this process in events. Not cached, since processes are forked."""
    return f"{_HOST}:{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Command:
    """The data that a worker needs, beside the log, to run a step once.

    Attributes:
        index: 0-based iteration, None outside of loops.
        length: items of the loop, None when it is not known beforehand (cursor loops).
        shard: the command belongs to a fan-out; its end is a ``loop.shard.*`` event.
        part: one of several commands of a shard, whose end is an event of its own after the last of them.
        follows: it comes after an attempt that succeeded: the next page, or the next poll.
        overrides: changed parts of the call, for paginated requests.
        owner: the command in the log that ends together with this one: the partition of an item. Empty: its own.
        claim: the ``command.claimed`` event by which a worker of a pool holds it.
        command_id: name of the command, a function of execution, step, visit, index and attempt.
    """

    execution_id: int
    step: str
    visit: int = 1
    attempt: int = 1
    index: int | None = None
    item: Any = None
    length: int | None = None
    loop_id: str | None = None
    shard: bool = False
    part: bool = False
    iter_key: str | None = None
    catalog_id: int | None = None
    parent_execution_id: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    follows: bool = False
    not_before: float = 0.0
    owner: str = ""
    claim: int | None = field(default=None, compare=False)
    command_id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        name = command_id(self.execution_id, self.step, self.visit, self.index, self.attempt)
        object.__setattr__(self, "command_id", name)

    @classmethod
    def of(cls, event: Event) -> Command:
        """Returns the command of an event, without its item."""
        meta = event.meta
        shard = "shard_id" in meta
        return cls(
            execution_id=event.execution_id,
            step=event.node_name or "",
            visit=meta["visit"],
            attempt=meta["attempt"],
            index=event.current_index,
            loop_id=meta.get("loop_id"),
            shard=shard,
            part=meta.get("part", False),
            follows=meta.get("follows", False),
            iter_key=meta["iter_key"] if shard else None,
            catalog_id=event.catalog_id,
            parent_execution_id=event.parent_execution_id,
        )

    @property
    def visit_key(self) -> tuple[int, str, int]:
        """Execution, step and visit."""
        return self.execution_id, self.step, self.visit

    def meta(self) -> dict[str, Any]:
        """Returns the part of an event's meta that identifies the command."""
        meta: dict[str, Any] = {"command_id": self.command_id, "visit": self.visit, "attempt": self.attempt}
        if self.loop_id is not None:
            meta["loop_id"] = self.loop_id
            meta["iter_index"] = self.index
        if self.shard:
            meta["shard_id"] = f"{self.loop_id}-{self.index}"  # the same in every attempt
            meta["shard_attempt"] = self.attempt
            meta["iter_key"] = self.iter_key if self.iter_key is not None else str(self.index)
        if self.part:
            meta["part"] = True
        if self.follows:
            meta["follows"] = True
        return meta


@dataclass(slots=True)
class Outcome:
    """The end of a command.

    Attributes:
        envelope: the result, small enough for the log.
        patches: ``[path, value]`` pairs that ``set`` wrote to ``ctx``.
        step_values: values that ``set`` wrote to ``step``; visible until the step has ended.
        tasks: per executed task its name, status, attempts and duration in milliseconds.
        values: values that ``set`` wrote to ``iter``, if the next attempt may run in another process.
        sink: the staged part of a sink, to be published when the end is in the log.
        reached: parts of the end's meta that move the step's watermark.
    """

    envelope: Envelope
    patches: list[tuple[list[str], Any]] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    duration: float = 0.0
    retryable: bool = False
    step_values: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    sink: PartPlace | None = None
    reached: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, end: Mapping[str, Any]) -> Outcome:
        """Reads the ``result`` and ``context`` of a command's end in the log."""
        context = end["context"] or {}
        patches = [(path, value) for path, value in context.get("patches", ())]
        return cls(
            from_result(end["result"]),
            patches,
            step_values=context.get("step", {}),
            values=context.get("iter", {}),
        )

    @property
    def failed(self) -> bool:
        """Reports a failure."""
        return bool(self.envelope["status"] != OK)

    @property
    def error(self) -> str | None:
        """Message of the failure, if any."""
        return str(self.envelope["error"]["message"]) if self.failed else None


class CommandEvents:
    """Makes the events of commands."""

    def __init__(self, ids: Snowflake, worker_id: str | None = None) -> None:
        self._ids = ids
        self.worker_id = worker_id or own_worker_id()

    def issued(
        self, command: Command, tool_kind: str, *, retry: Mapping[str, Any] | None = None, page: int | None = None
    ) -> Event:
        """Makes ``command.issued``.

        Args:
            retry: why the command is tried again after a failure.
            page: number of the page that it requests, from 2 on.
        """
        event = self._event(command, EventType.COMMAND_ISSUED, "PENDING")
        event.node_type = tool_kind
        if retry is not None:
            event.meta["retry"] = retry
        if page is not None:
            event.meta["page"] = page
        if command.not_before:
            event.meta["not_before"] = command.not_before
        if command.overrides:
            event.context = {"overrides": command.overrides}
        return event

    def claimed(self, command: Command) -> Event:
        """Makes ``command.claimed``."""
        return self._event(command, EventType.COMMAND_CLAIMED, "RUNNING", by_worker=True)

    def heartbeat(self, command: Command, note: str = "") -> Event:
        """Makes ``command.heartbeat``. ``note`` describes the command's progress."""
        event = self._event(command, EventType.COMMAND_HEARTBEAT, "RUNNING", by_worker=True)
        if note:
            event.meta["note"] = note
        return event

    def partial(
        self, command: Command, envelope: Envelope, chunk: dict[str, Any], context: dict[str, Any] | None = None
    ) -> Event:
        """Makes ``call.partial``: a chunk of the result; its command resumes after it from its ``context``."""
        status = "FAILED" if envelope["status"] != OK else "COMPLETED"
        event = self._event(command, EventType.CALL_PARTIAL, status, by_worker=True)
        event.meta |= chunk
        event.result, event.context = to_result(envelope), context
        return event

    def ended(self, command: Command, outcome: Outcome, *, final: bool = True) -> Event:
        """Makes the terminal event. ``final`` is false when a failed shard or attempt will be tried again."""
        if command.shard and not command.part:
            type_ = EventType.LOOP_SHARD_FAILED if outcome.failed else EventType.LOOP_SHARD_DONE
        else:
            type_ = EventType.COMMAND_FAILED if outcome.failed else EventType.COMMAND_COMPLETED
        event = self._event(command, type_, "FAILED" if outcome.failed else "COMPLETED", by_worker=True)
        if outcome.tasks:
            event.meta["tasks"] = outcome.tasks
        if outcome.sink is not None:
            event.meta["sink"] = outcome.sink.model_dump(mode="json", exclude_defaults=True)
        if outcome.failed:
            event.meta["final"] = final and not command.part
        event.meta |= outcome.reached
        event.result, event.error = to_result(outcome.envelope), outcome.error
        event.duration = outcome.duration
        context = {"patches": outcome.patches, "iter": outcome.values, "step": outcome.step_values}
        event.context = {name: values for name, values in context.items() if values} or None
        return event

    def cancelled(self, command: Command, reason: str) -> Event:
        """Makes the terminal event of a command that ends with its execution."""
        error = ToolError(
            f"step {command.step}: execution {command.execution_id} was cancelled: {reason}",
            kind="cancelled",
            code="EXECUTION_CANCELLED",
        )
        return self.ended(command, Outcome(error_envelope(error)))

    def shard_ended(self, last: Command, outcome: Outcome) -> Event:
        """Makes the end of a shard of several commands, once for the ``last`` of them."""
        whole = replace(outcome, tasks=[], values={}, sink=None, reached={})
        event = self.ended(replace(last, part=False), whole)
        event.meta["command_id"] = f"{last.command_id}/shard"
        return event

    def sequence(self, command: Command, outcome: Outcome, attempts: int) -> Event:
        """Makes ``retry_sequence_completed``: the result of all attempts together, after the last of them."""
        event = self._event(command, EventType.RETRY_SEQUENCE_COMPLETED, "COMPLETED")
        event.meta["total_attempts"] = attempts
        event.result = to_result(outcome.envelope)
        event.context = {"patches": outcome.patches} if outcome.patches else None
        return event

    def item(self, command: Command, current_item: Any = None) -> Event:
        """Makes ``loop.item`` or, for a fan-out, ``loop.shard.enqueued``; ``current_item`` is for people to read."""
        type_ = EventType.LOOP_SHARD_ENQUEUED if command.shard else EventType.LOOP_ITEM
        event = self._event(command, type_, "dispatched")
        event.node_type, event.current_item = "loop", current_item
        return event

    def _event(self, command: Command, type_: EventType, status: str, *, by_worker: bool = False) -> Event:
        return Event(
            execution_id=command.execution_id,
            event_id=self._ids.next(),
            event_type=type_,
            node_name=command.step,
            status=status,
            catalog_id=command.catalog_id,
            parent_event_id=command.claim,
            parent_execution_id=command.parent_execution_id,
            meta=command.meta(),
            current_index=command.index,
            worker_id=self.worker_id if by_worker else None,
        )
