"""Connections to NATS that live as long as their process, whatever becomes of the server."""

from __future__ import annotations

import asyncio
import logging
import re

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.25
PENDING_BYTES = 64 * 1024**2
"""What is published while the server is away waits in memory, up to this size."""

_BETWEEN = re.compile(r",(?=\s*\w+://)")


class _Client(NatsClient):
    """A client whose reading no message ends.

    A server takes any bytes for a subject; nats-py stops reading for good at one that is not UTF-8. The bytes
    that are none become U+FFFD here, and whoever takes the message refuses it.
    """

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        subject, reply = (text.decode(errors="replace").encode() for text in (subject, reply))
        return super()._build_message(sid, subject, reply, data, headers)


async def connect(settings: Settings, name: str) -> NatsClient:
    """Connects to the settings' server and keeps reconnecting for ever.

    Args:
        name: what the server's monitoring shows.

    Raises:
        ServiceError: the server cannot be reached within ``nats_connect_seconds``.
    """
    if settings.nats_url is None:
        raise ServiceError("no NATS server is known; set NOETL_NATS_URL or run 'noetl-dagster services up'")

    client = _Client()
    latest: Exception | None = None

    async def on_error(error: Exception) -> None:
        nonlocal latest
        latest = error
        logger.debug("NATS (%s): %r", name, error)

    async def on_disconnect() -> None:
        if not client.is_closed:
            logger.warning("NATS (%s): connection lost; reconnecting", name)

    try:
        async with asyncio.timeout(settings.nats_connect_seconds):  # nats-py itself would try for ever
            await client.connect(
                settings.nats_url,
                tls=settings.nats_tls,
                name=f"{settings.nats_namespace} {name}",
                connect_timeout=settings.nats_connect_seconds,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_SECONDS,
                pending_size=PENDING_BYTES,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
            )
    except Exception as error:
        raise ServiceError(
            f"NATS at {without_login(settings.nats_url)} cannot be reached: {latest or error!r}; "
            "check NOETL_NATS_URL and NOETL_NATS_CA"
        ) from None
    return client


def without_login(urls: str) -> str:
    """Addresses, one or several with commas, without the users, passwords and tokens in them.

    Whatever stands between ``//`` and the last ``@`` is taken for a login: passwords may be badly escaped.
    """
    return ",".join(re.sub(r"//.*@", "//", url) for url in _BETWEEN.split(urls))
