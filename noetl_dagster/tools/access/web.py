"""HTTP for the tools of one process: a shared session of aiohttp, addresses, redirects.

aiohttp takes 0.28 ms of CPU a request however many connections there are; httpx took 1.5 ms at 16 and 3.5 ms at 64,
and 0.66 ms over aiohttp's transport.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode
from urllib.request import getproxies, proxy_bypass

from yarl import URL

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession, ClientTimeout

CONNECTIONS = 256
KEEPALIVE_SECONDS = 15.0
HEADER_BYTES = 64 * 1024
MAX_REDIRECTS = 20
USER_AGENT = "noetl-dagster"

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SENDABLE = re.compile(r"[!#$%&'()*+,\-./0-9:;=?@A-Z\[\]_a-z~]*")
_OWN_TO_AN_ORIGIN = frozenset({"authorization", "cookie", "host"})
_ABOUT_THE_BODY = frozenset({"content-length", "content-type", "transfer-encoding"})


class WebError(Exception):
    """There is no response, or only a part of one.

    Attributes:
        retryable: another attempt may succeed.
        late: the request timed out.
    """

    def __init__(self, message: str, *, retryable: bool = True, late: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.late = late


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request to send.

    Attributes:
        secrets: lower-case names of headers that only the first origin may receive.
    """

    method: str
    url: URL
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    secrets: frozenset[str] = frozenset()


def open_session(*, verify_ssl: bool = True) -> ClientSession:
    """Returns a session of the running event loop. It stores no cookies, so its users share connections only."""
    from aiohttp import ClientSession, DummyCookieJar, TCPConnector

    connector = TCPConnector(limit=CONNECTIONS, keepalive_timeout=KEEPALIVE_SECONDS, ssl=verify_ssl)
    return ClientSession(
        connector=connector,
        cookie_jar=DummyCookieJar(),
        headers={"User-Agent": USER_AGENT},
        skip_auto_headers=("Content-Type",),
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )


@lru_cache(maxsize=64)
def _patience(seconds: float) -> ClientTimeout:
    """Allows ``seconds`` to connect, and as many for each part of the response."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, connect=seconds, sock_read=seconds)


@asynccontextmanager
async def answered(
    session: ClientSession, request: HttpRequest, *, seconds: float, follow: bool = False
) -> AsyncIterator[ClientResponse]:
    """Yields the response with its body still unread; follows redirects if ``follow`` is set.

    Data for the first origin (``HttpRequest.secrets``, authorization, cookies) is not sent to another one.

    Args:
        seconds: time limit for connecting, and for each part of the response.

    Raises:
        WebError: there is no response, or its body broke off while the caller read it.
    """
    from aiohttp import ClientError, InvalidURL, NonHttpUrlClientError

    response = None
    try:
        response = await _final(session, request, seconds, follow)
        yield response
    except TimeoutError as error:  # of aiohttp, for which it is a client error too
        raise WebError(f"{type(error).__name__}", late=True) from error
    except (InvalidURL, NonHttpUrlClientError) as error:
        raise WebError("the address is not one of http or https", retryable=False) from error
    except (ClientError, OSError) as error:
        raise WebError(f"{type(error).__name__}: {error}") from error
    finally:
        if response is not None:
            response.release()


async def _final(session: ClientSession, request: HttpRequest, seconds: float, follow: bool) -> ClientResponse:
    from aiohttp import CookieJar

    jar: CookieJar | None = None  # for this chain of redirects
    for _ in range(MAX_REDIRECTS + 1):
        response = await session.request(
            request.method,
            request.url,
            headers=request.headers,
            data=request.body,
            cookies=None if jar is None else jar.filter_cookies(request.url),
            timeout=_patience(seconds),
            proxy=_proxy(request.url),
            allow_redirects=False,
        )
        try:
            following = _redirected(request, response) if follow else None
        except (WebError, ValueError):
            response.close()
            raise
        if following is None:
            return response
        if response.cookies:
            jar = CookieJar(unsafe=True) if jar is None else jar  # addresses without a name too
            jar.update_cookies(response.cookies, response.url)
        response.release()
        request = following
    raise WebError(f"more than {MAX_REDIRECTS} redirects", retryable=False)


@cache
def _proxies() -> dict[str, str]:
    return getproxies()


def _proxy(url: URL) -> str | None:
    """Returns the proxy of the environment. aiohttp's own search would also send passwords of ``~/.netrc``."""
    proxies = _proxies()
    if not proxies or proxy_bypass(url.host or ""):
        return None
    return proxies.get(url.scheme)


def _redirected(request: HttpRequest, response: ClientResponse) -> HttpRequest | None:
    """Returns the request that a response redirects to (RFC 9110, 15.4), None if it is no redirect."""
    location, status = response.headers.get("Location"), response.status
    if status not in _REDIRECTS or location is None:
        return None
    url = request.url.join(address(location))
    if url.scheme not in ("http", "https"):
        raise WebError(f"it redirects to {url.scheme}:, which is neither http nor https", retryable=False)
    if request.url.fragment and not url.fragment:
        url = url.with_fragment(request.url.fragment)
    headers, method, body = request.headers, request.method, request.body
    if not same_origin(url, request.url):
        headers = _without(headers, request.secrets | _OWN_TO_AN_ORIGIN)
    if method not in ("GET", "HEAD") and (status in (302, 303) or (status == 301 and method == "POST")):
        headers, method, body = _without(headers, _ABOUT_THE_BODY), "GET", None
    return replace(request, method=method, url=url, headers=headers, body=body)


def _without(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in names}


def address(url: str, params: Mapping[str, Any] | None = None) -> URL:
    """Returns an address with ``params`` in its query; characters that cannot be sent are percent-encoded.

    Parameters replace those of the same name; a list becomes one for each of its values, null none.

    Raises:
        ValueError: it is no address.
    """
    encoded = _SENDABLE.fullmatch(url) is not None
    pairs = _pairs({name: value for name, value in (params or {}).items() if value is not None})
    if not pairs:
        return URL(url, encoded=encoded)
    if encoded and "?" not in url and "#" not in url:
        return URL(f"{url}?{urlencode(pairs)}", encoded=True)
    written = URL(url, encoded=encoded)
    before = parse_qsl(written.raw_query_string, keep_blank_values=True)
    given = {name for name, _ in pairs}
    kept = [(name, text) for name, text in before if name not in given]
    bare = written.with_query(None).with_fragment(None)
    return URL(f"{bare}?{urlencode(kept + pairs)}", encoded=True)


def form_encoded(fields: Mapping[str, Any]) -> bytes:
    """Returns the body of a form; a list becomes one field for each of its values, null an empty one."""
    return urlencode(_pairs(fields)).encode()


def _pairs(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name), text) for name, value in fields.items() for text in _texts(value)]


def _texts(value: Any) -> Iterable[str]:
    """Yields values as a query or form contains them: true and false as JSON writes them."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, bool):
            yield "true" if item else "false"
        else:
            yield "" if item is None else str(item)


def same_origin(one: URL, other: URL) -> bool:
    """Reports whether two addresses have the same scheme, host and port."""
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def public(url: URL) -> str:
    """Returns an address without user name and password."""
    return str(url.with_user(None)) if url.raw_user or url.raw_password else str(url)


async def bounded_body(response: ClientResponse, most: int) -> bytes:
    """Returns the decompressed body of a response.

    Raises:
        WebError: it has more than ``most`` bytes; the rest is not read.
    """
    body = bytearray()
    async for block in response.content.iter_any():
        body += block
        if len(body) > most:
            response.close()
            raise WebError(f"its body has more than {most} bytes (NOETL_HTTP_BODY_BYTES)", retryable=False)
    return bytes(body)
