"""Commands one by one, by their notices: for a control plane of an earlier version."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping

import nats.errors

from noetl_dagster.events.ids import Snowflake
from noetl_dagster.pool_worker.claimer import Claimed
from noetl_dagster.pool_worker.control import ControlPlane
from noetl_dagster.pool_worker.notices import Notices

logger = logging.getLogger(__name__)

CLAIM_AGAIN_SECONDS = 5.0


class SingleClaims:
    """Claims the command of each notice; as :class:`~noetl_dagster.pool_worker.claimer.Claimer` otherwise."""

    waiting = 0

    def __init__(
        self,
        control: ControlPlane,
        ids: Snowflake,
        worker_id: str,
        slots: int,
        *,
        limits: Mapping[str, int],
        notices: Notices,
    ) -> None:
        self._control = control
        self._ids = ids
        self._worker_id = worker_id
        self._slots = slots
        self._limits = limits
        self._notices = notices
        self._running: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @property
    def active(self) -> int:
        return self._running.total()

    @property
    def has_room(self) -> bool:
        return self.active < self._slots

    def room(self, tool_kind: str) -> int:
        free = self._slots - self.active
        limit = self._limits.get(tool_kind)
        return free if limit is None else min(free, limit - self._running[tool_kind])

    def open(self) -> None:
        """Notices come by themselves."""

    def wake(self) -> None:
        """A command comes with its notice."""

    async def next(self) -> Claimed:
        while True:
            offer = await self._notices.next()
            notice = offer.notice
            self._running[notice.tool_kind] += 1
            event_id = self._ids.next()
            grant = None
            try:
                grant = await self._control.claim(
                    notice.execution_id, notice.command_id, self._worker_id, event_id
                )
                with contextlib.suppress(nats.errors.Error, OSError):
                    await offer.message.ack()
            except Exception as error:
                logger.warning("command %s cannot be claimed now: %r", notice.command_id, error)
                with contextlib.suppress(nats.errors.Error, OSError):
                    await offer.message.nak(delay=CLAIM_AGAIN_SECONDS)
            finally:
                if grant is None:
                    self._free(notice.tool_kind)
            if grant is not None:
                now = asyncio.get_running_loop().time()
                return Claimed(notice.tool_kind, event_id, grant, now)
            logger.debug("command %s is somebody else's, or has ended", notice.command_id)

    def ended(self, claimed: Claimed, seconds: float) -> None:
        self._free(claimed.tool_kind)

    async def close(self) -> None:
        """What is claimed has begun."""

    async def idle(self) -> None:
        """Waits until nothing runs."""
        while self.active:
            self._freed.clear()
            await self._freed.wait()

    def _free(self, tool_kind: str) -> None:
        self._running[tool_kind] -= 1
        self._freed.set()
        self._notices.freed.set()
