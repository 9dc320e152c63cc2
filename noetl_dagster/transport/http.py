"""The transport over the HTTP API: ``POST /api/events/batch``."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from noetl_dagster.errors import EventRefusedError, EventTooLargeError, TransportError
from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.types import Event
from noetl_dagster.retrying import Patience, patiently
from noetl_dagster.settings import Settings
from noetl_dagster.transport.wire import message_of

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


def open_client(settings: Settings) -> httpx.AsyncClient:
    """A client of the HTTP API with the settings' token and certificate authority."""
    headers = {}
    if settings.server_token is not None:
        headers["authorization"] = f"Bearer {settings.server_token.get_secret_value()}"
    return httpx.AsyncClient(
        base_url=settings.server_url,
        headers=headers,
        verify=str(settings.server_ca) if settings.server_ca is not None else True,
        timeout=httpx.Timeout(30.0),
        limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
    )


class HttpTransport:
    """Posts events in batches and tries again while the server is away or overloaded.

    Args:
        patience: seconds for which an unreachable server is tried again.
    """

    transactional = False

    def __init__(self, client: httpx.AsyncClient, *, patience: float = 300.0) -> None:
        self._client = client
        self._patience = patience

    async def publish(self, events: Sequence[Event]) -> None:
        content = encode_json({"events": [message_of(event) for event in events]})
        response = await request_patiently(
            self._client, "POST", "/api/events/batch", content=content, patience=self._patience
        )
        if response.status_code == 413:
            if len(events) > 1:
                middle = len(events) // 2
                await self.publish(events[:middle])
                await self.publish(events[middle:])
                return
            raise EventTooLargeError(f"event of {len(content)} bytes: {response.text[:300]}")
        if response.is_error:
            raise EventRefusedError(
                f"the HTTP API refuses events: {response.status_code} {response.text[:500]}"
            )

    async def close(self) -> None:
        await self._client.aclose()


class _Unanswered(TransportError):
    """No answer, or one that says to come again; after ``retry_after`` seconds where the server wishes so."""

    def __init__(self, message: str, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = _seconds(retry_after)


async def request_patiently(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    *,
    content: bytes | None = None,
    patience: float = 300.0,
) -> httpx.Response:
    """Sends a request that may be sent twice, again and again until it is answered.

    Raises:
        TransportError: no answer within ``patience`` seconds.
    """
    headers = {"content-type": "application/json"} if content is not None else None

    def unanswered(reason: str, retry_after: str | None = None) -> _Unanswered:
        where = f"{method} {client.base_url}{path}"
        return _Unanswered(
            f"{where}: {reason}; check NOETL_SERVER_URL and 'noetl-dagster serve'", retry_after
        )

    async def request() -> httpx.Response:
        try:
            response = await client.request(method, path, content=content, headers=headers)
        except httpx.TransportError as error:
            raise unanswered(repr(error)) from error
        if response.status_code in RETRIED_STATUS:
            raise unanswered(f"status {response.status_code}", response.headers.get("retry-after"))
        return response

    return await patiently(request, Patience((_Unanswered,), seconds=patience))


def _seconds(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
