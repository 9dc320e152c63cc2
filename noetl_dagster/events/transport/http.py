"""The HTTP API as workers call it, and the transport over it: ``POST /api/events/batch``."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.request import getproxies

import orjson
from pydantic import BaseModel, ValidationError

from noetl_dagster.errors import EventRefusedError, EventTooLargeError, TransportError, first_invalid
from noetl_dagster.events.transport.base import Transport, note_refused
from noetl_dagster.events.transport.wire import CLIENT_HEADER, message_of
from noetl_dagster.events.types import Event
from noetl_dagster.process import tracing
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import Settings
from noetl_dagster.values import encode_json

if TYPE_CHECKING:
    from aiohttp import ClientSession

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
CONNECTIONS = 64
ANSWER_SECONDS = 30.0
PATIENCE_SECONDS = 300.0
"""Requests to an unreachable server are repeated for this long."""


Model = TypeVar("Model", bound=BaseModel)


class AnswerError(TransportError):
    """An answer is none of the HTTP API of this version."""


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """An answer of the API; ``url`` is that of the request, for messages."""

    status: int
    content: bytes
    url: str

    @property
    def is_error(self) -> bool:
        """True if the status is 400 or above."""
        return self.status >= 400

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode("utf-8", "replace")

    def read(self, model: type[Model]) -> Model:
        """Returns the parsed body of a successful answer.

        Raises:
            TransportError: the API refuses the request.
            AnswerError: the body has another form, for example that of a proxy's page.
        """
        try:  # orjson, since jsonb writes large floats with all their zeros, which pydantic would take for integers
            return model.model_validate(orjson.loads(self.checked().content))
        except (ValidationError, orjson.JSONDecodeError) as error:
            invalid = first_invalid(error) if isinstance(error, ValidationError) else str(error)
            raise AnswerError(
                f"{self.url}: {self.status} with an unexpected answer: {invalid[:300]}; NOETL_SERVER_URL "
                "must lead to 'noetl-dagster serve' of this version"
            ) from None

    def checked(self) -> ApiResponse:
        """Returns the answer itself; raises ``TransportError`` if it is an error."""
        if self.is_error:
            raise TransportError(f"{self.url}: {self.status} {self.text[:300]}")
        return self


class ApiClient:
    """Calls the HTTP API of the settings, with their token and certificate authority.

    A call may be sent twice: the caller names everything that it creates.
    """

    def __init__(self, settings: Settings) -> None:
        self._url = settings.server_url.rstrip("/")
        self._ca = settings.server_ca
        self._headers = {"content-type": "application/json", CLIENT_HEADER: "noetl-dagster"}
        if settings.server_token is not None:
            self._headers["authorization"] = f"Bearer {settings.server_token.get_secret_value()}"
        self._session: ClientSession | None = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        patience: float = PATIENCE_SECONDS,
        headers: dict[str, str] | None = None,
    ) -> ApiResponse:
        """Sends a request, repeatedly until it is answered.

        Args:
            headers: further ones; default: those of the current trace, if one is recorded.

        Raises:
            TransportError: no answer within ``patience`` seconds.
        """
        from aiohttp import ClientError

        url = self._url + path
        carried = tracing.headers() if headers is None else headers

        def unanswered(reason: str, retry_after: str | None = None) -> _Unanswered:
            hint = "check NOETL_SERVER_URL and 'noetl-dagster serve'"
            return _Unanswered(f"{method} {url}: {reason}; {hint}", retry_after)

        async def send() -> ApiResponse:
            try:
                async with self._open().request(method, url, data=content, headers=carried) as response:
                    answer = ApiResponse(response.status, await response.read(), url)
                    retry_after = response.headers.get("retry-after")
            except (ClientError, TimeoutError, OSError) as error:
                raise unanswered(repr(error)) from error
            if answer.status in RETRIED_STATUS:
                raise unanswered(f"status {answer.status}", retry_after)
            return answer

        return await with_retries(send, RetryLimits((_Unanswered,), seconds=patience))

    async def close(self) -> None:
        """Closes the session, if one is open."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # the transports close in the loop's next iteration
            self._session = None

    def _open(self) -> ClientSession:
        """Returns the session of the running event loop, opened on first use."""
        from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

        if self._session is None:
            trusted = ssl.create_default_context(cafile=str(self._ca)) if self._ca is not None else True
            self._session = ClientSession(
                connector=TCPConnector(limit=CONNECTIONS, ssl=trusted),
                cookie_jar=DummyCookieJar(),
                headers=self._headers,
                timeout=ClientTimeout(total=ANSWER_SECONDS),
                trust_env=bool(getproxies()),  # trust_env looks up the proxies for each request
            )
        return self._session


class _Taken(BaseModel):
    """The part of an answer that an HTTP transport reads."""

    refused: set[int] = set()


class HttpTransport(Transport):
    """Posts events in batches, repeatedly while the server is unavailable or overloaded."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def publish(self, events: Sequence[Event]) -> None:
        """Posts the events; a batch that is too large is halved."""
        content = encode_json({"events": [message_of(event) for event in events]})
        headers = tracing.headers_about(events[0].execution_id, events[0].meta.get("command_id"))
        answer = await self._client.request("POST", "/api/events/batch", content=content, headers=headers)
        if answer.status == 413:
            if len(events) > 1:
                middle = len(events) // 2
                await self.publish(events[:middle])
                await self.publish(events[middle:])
                return
            raise EventTooLargeError(f"event of {len(content)} bytes: {answer.text[:300]}")
        if answer.status == 409:
            note_refused(events, {event.event_id for event in events})
            return
        if answer.is_error:
            raise EventRefusedError(f"the HTTP API refuses events: {answer.status} {answer.text[:500]}")
        note_refused(events, answer.read(_Taken).refused)

    async def close(self) -> None:
        """Closes the client."""
        await self._client.close()


class _Unanswered(TransportError):
    """No answer, or one that asks to try again, after ``retry_after`` seconds if the server specifies them."""

    def __init__(self, message: str, retry_after: str | None = None) -> None:
        super().__init__(message)
        try:
            self.retry_after = float(retry_after or 0)
        except ValueError:  # a date
            self.retry_after = 0.0
