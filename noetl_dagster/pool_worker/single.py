"""Commands one by one, by their notices: for a control plane of an earlier version."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

import nats.errors

from noetl_dagster.events.ids import Snowflake
from noetl_dagster.pool_worker.claimer import Claimed
from noetl_dagster.pool_worker.control import ControlPlane
from noetl_dagster.pool_worker.notices import Notices
from noetl_dagster.pool_worker.places import Places

logger = logging.getLogger(__name__)

CLAIM_AGAIN_SECONDS = 5.0


class SingleClaims(Places):
    """Claims the command of each notice; as :class:`~noetl_dagster.pool_worker.claimer.Claimer` otherwise."""

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
        super().__init__(slots, limits)
        self._control = control
        self._ids = ids
        self._worker_id = worker_id
        self._notices = notices

    def open(self) -> None:
        """Notices come by themselves."""

    def wake(self) -> None:
        """A command comes with its notice."""

    async def next(self) -> Claimed:
        while True:
            offer = await self._notices.next()
            notice = offer.notice
            self._begin(notice.tool_kind)
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
                    self._end(notice.tool_kind)
            if grant is not None:
                now = asyncio.get_running_loop().time()
                return Claimed(notice.tool_kind, event_id, grant, now)
            logger.debug("command %s is somebody else's, or has ended", notice.command_id)

    def ended(self, claimed: Claimed, seconds: float) -> None:
        self._end(claimed.tool_kind)

    async def close(self) -> None:
        """What is claimed has begun."""

    def _end(self, tool_kind: str) -> None:
        super()._end(tool_kind)
        self._notices.freed.set()
