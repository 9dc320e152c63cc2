"""The event types of the log, and the event row."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any


class EventType(StrEnum):
    """The type of an event, as the log stores it."""

    PLAYBOOK_INITIALIZED = "playbook.initialized"
    PLAYBOOK_COMPLETED = "playbook.completed"
    PLAYBOOK_FAILED = "playbook.failed"
    WORKFLOW_INITIALIZED = "workflow.initialized"
    WORKFLOW_COMPLETED = "workflow.completed"
    WORKFLOW_FAILED = "workflow.failed"
    EXECUTION_RESUMED = "execution.resumed"
    EXECUTION_CANCELLED = "execution.cancelled"
    EXECUTION_REPORTED = "execution.reported"

    STEP_ENTER = "step.enter"
    STEP_EXIT = "step.exit"
    STEP_SKIPPED = "step.skipped"
    CHECK_EVALUATED = "check.evaluated"

    COMMAND_ISSUED = "command.issued"
    COMMAND_CLAIMED = "command.claimed"
    COMMAND_HEARTBEAT = "command.heartbeat"
    COMMAND_COMPLETED = "command.completed"
    COMMAND_FAILED = "command.failed"
    CALL_PARTIAL = "call.partial"

    LOOP_STARTED = "loop.started"
    LOOP_ITEM = "loop.item"
    LOOP_DONE = "loop.done"
    LOOP_FANOUT_STARTED = "loop.fanout.started"
    LOOP_SHARD_ENQUEUED = "loop.shard.enqueued"
    LOOP_SHARD_DONE = "loop.shard.done"
    LOOP_SHARD_FAILED = "loop.shard.failed"
    LOOP_FANIN_COMPLETED = "loop.fanin.completed"

    STATE_SET = "state.set"
    STATE_CLAIMED = "state.claimed"

    RETRY_SEQUENCE_COMPLETED = "retry_sequence_completed"
    WARNING = "warning"


SHARD_ENDS = frozenset({EventType.LOOP_SHARD_DONE, EventType.LOOP_SHARD_FAILED})
COMMAND_ENDS = SHARD_ENDS | {EventType.COMMAND_COMPLETED, EventType.COMMAND_FAILED}
"""Events that end a command; at most one for each command."""


@dataclass(slots=True)
class Event:
    """One row of ``noetl.event``. The emitter creates the ``event_id``, so that sending twice is harmless."""

    execution_id: int
    event_id: int
    event_type: str
    node_name: str | None = None
    node_type: str | None = None
    status: str | None = None
    catalog_id: int | None = None
    parent_event_id: int | None = None
    parent_execution_id: int | None = None
    duration: float | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    current_index: int | None = None
    current_item: Any = None
    worker_id: str | None = None
    created_at: datetime | None = None
