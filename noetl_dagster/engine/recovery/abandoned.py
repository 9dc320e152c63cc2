"""Finds RUNNING executions that no process drives, and decides when each is resumed.

The log holds everything that a resumption needs; NATS and the memory of the dead process do not matter. Resumptions are
bounded and back off, so that an execution that kills its process ends eventually.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import orjson

from noetl_dagster.engine.executions.lifecycle import Lifecycle
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import NoetlError
from noetl_dagster.events.projection import Projection

logger = logging.getLogger(__name__)

RECOVERY = "recovery"
"""Key in the meta of ``execution.resumed``: the epoch was opened by recovery, not by a person."""

CANDIDATES = 500

# Top executions that run by the projection; children go on with their parents.
_RUNNING = """
SELECT execution_id FROM noetl.execution
WHERE status = 'RUNNING' AND parent_execution_id IS NULL AND execution_id > $1
ORDER BY execution_id LIMIT $2
"""
_LAST_EVENT = """
SELECT extract(epoch FROM created_at)::float8 FROM noetl.event
WHERE execution_id = $1 ORDER BY event_id DESC LIMIT 1
"""
_RECOVERIES = """
SELECT count(*) FROM noetl.event
WHERE execution_id = $1 AND event_type = 'execution.resumed' AND meta ? 'recovery'
"""


class Verdict(StrEnum):
    """The decision about an abandoned execution."""

    RESUME = "resume"
    WAIT = "wait"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The latest of ``count`` requests to open an ``epoch``, ``at`` a Unix time. The caller remembers it."""

    epoch: int
    count: int
    at: float


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An execution whose process is gone. Resuming opens ``epoch``, from the Unix time ``due`` on."""

    execution_id: int
    playbook: str
    source: str
    epoch: int
    attempts: int
    due: float
    verdict: Verdict


class Recovery:
    """Decides about abandoned executions. It starts nothing; the caller does."""

    def __init__(self, runtime: Runtime, lifecycle: Lifecycle, liveness: Liveness) -> None:
        self._runtime = runtime
        self._lifecycle = lifecycle
        self._liveness = liveness

    async def abandoned(
        self, requested: Mapping[int, ResumeRequest] | None = None, *, now: datetime | None = None
    ) -> list[Abandoned]:
        """Returns every execution without a driver, oldest first, with its verdict; ``requested`` are earlier requests.

        A driver may be between two processes (Dagster's multiprocess executor starts one for each op), so
        an execution counts as abandoned only after a pause without any event.
        """
        await Projection(self._runtime.pool).catch_up()
        moment = (now or datetime.now(UTC)).timestamp()
        found, after = [], 0
        while page := await self._runtime.pool.fetch(_RUNNING, after, CANDIDATES):
            for row in page:
                after = row["execution_id"]
                if await self._liveness.is_driven(after):
                    continue
                try:
                    abandoned = await self._judge(after, (requested or {}).get(after), moment)
                except NoetlError as error:  # the others do not wait for it
                    hint = f"end it with 'noetl-dagster cancel {after}'"
                    logger.warning("execution %d cannot be resumed: %s; %s", after, error, hint)
                    continue
                if abandoned is not None:
                    found.append(abandoned)
        return found

    async def give_up(self, abandoned: Abandoned) -> None:
        """Ends an execution whose resumptions failed."""
        execution = await self._runtime.load(abandoned.execution_id)
        await self._lifecycle.fail(
            execution,
            f"its process ended {abandoned.attempts + 1} times without a word; look for crashes and memory "
            f"limits, then go on with 'noetl-dagster resume {abandoned.execution_id}'",
        )

    async def _judge(self, execution_id: int, request: ResumeRequest | None, now: float) -> Abandoned | None:
        execution = await self._runtime.load(execution_id)
        state = execution.state
        if not state.is_running:
            return None
        pool, settings = self._runtime.pool, self._runtime.settings
        attempts = int(await pool.fetchval(_RECOVERIES, execution_id))
        quiet_since = await pool.fetchval(_LAST_EVENT, execution_id)
        if request is not None and request.epoch == state.epoch + 1:
            attempts += request.count
            quiet_since = max(quiet_since, request.at)
        due = quiet_since + settings.recovery_backoff_seconds * 2**attempts
        verdict = Verdict.RESUME if attempts < settings.recovery_attempts else Verdict.GIVE_UP
        if now < due:
            verdict = Verdict.WAIT
        source, epoch = execution.playbook.source, state.epoch + 1
        return Abandoned(execution_id, state.playbook, source, epoch, attempts, due, verdict)


def remembered(text: str | None) -> dict[int, ResumeRequest]:
    """Reads requests from the text that :func:`remember` made."""
    known: dict[str, Any] = orjson.loads(text) if text else {}
    return {int(execution_id): ResumeRequest(*entry) for execution_id, entry in known.items()}


def remember(requests: Mapping[int, ResumeRequest]) -> str:
    """Returns requests as text, for a sensor's cursor."""
    return orjson.dumps({str(key): [one.epoch, one.count, one.at] for key, one in requests.items()}).decode()
