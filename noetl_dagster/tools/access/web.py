"""HTTP for the tools of one process: a shared session of aiohttp, addresses, redirects.

aiohttp takes 0.28 ms of CPU a request however many connections there are; httpx took 1.5 ms at 16 and 3.5 ms at 64,
and 0.66 ms over aiohttp's transport.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, quote_plus, urlencode
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from noetl_dagster.errors import FormatError
from noetl_dagster.playbook.templates.environment import text_of
from noetl_dagster.playbook.wording import described
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.storage.compression import RAW_DEFLATE, Unpacker
from noetl_dagster.tools.access.destinations import DenyList, Destinations, RefusedAddressError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession, ClientTimeout

CONNECTIONS = 256
KEEPALIVE_SECONDS = 15.0
HEADER_BYTES = 64 * 1024
MAX_REDIRECTS = 20
USER_AGENT = "noetl-dagster"
NOTHING_DENIED = DenyList()

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_COMPRESSIONS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_NOT_READ = frozenset({"br", "zstd", "compress", "x-compress"})
_quoted = lru_cache(maxsize=4096)(quote_plus)
"""Most names and values of queries repeat."""

_SENDABLE = re.compile(r"[!#$%&'()*+,\-./0-9:;=?@A-Z\[\]_a-z~]*")
_FOR_ANY_ORIGIN = frozenset(
    {
        *("accept", "accept-encoding", "accept-language", "cache-control", "if-match", "if-modified-since"),
        *("if-none-match", "if-range", "if-unmodified-since", "range", "user-agent", "traceparent", "tracestate"),
    }
)
"""Headers that describe the wanted response, which redirects to another origin keep."""

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


class HttpRequest(NamedTuple):
    """A request to send.

    Attributes:
        secrets: lower-case names of headers that only the first origin may receive, besides those with a known secret.
    """

    method: str
    url: URL
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes | None = None
    secrets: frozenset[str] = frozenset()


class Web:
    """The sessions of one event loop. They store no cookies, so their users share connections only.

    Most requests use one session. Requests after a redirect from a public address have connections of their own, and
    so have requests through a proxy if addresses are refused, since the proxy's own address is not the server's.
    """

    def __init__(self, denied: DenyList = NOTHING_DENIED, *, verify_ssl: bool = True) -> None:
        self._verify_ssl = verify_ssl
        self.anywhere = Destinations(denied)
        self.public = Destinations(denied, public_only=True)
        self._sessions: dict[Destinations | None, ClientSession] = {}

    def session(self, destinations: Destinations | None) -> ClientSession:
        """Returns the session whose connections reach some destinations; None: all."""
        session = self._sessions.get(destinations)
        if session is None or session.closed:
            session = self._sessions[destinations] = self._opened(destinations)
        return session

    def _opened(self, destinations: Destinations | None) -> ClientSession:
        from aiohttp import ClientSession, DummyCookieJar, TCPConnector

        connector = TCPConnector(
            limit=CONNECTIONS,
            keepalive_timeout=KEEPALIVE_SECONDS,
            ssl=self._verify_ssl,
            socket_factory=None if destinations is None else destinations.connector,
        )
        return ClientSession(
            connector=connector,
            cookie_jar=DummyCookieJar(),
            headers={"User-Agent": USER_AGENT, "Accept-Encoding": "gzip, deflate"},
            skip_auto_headers=("Content-Type",),
            auto_decompress=False,  # which does not notice that a gzip body was cut; see body_blocks
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            response_class=_response_class(),
        )

    async def close(self) -> None:
        """Closes all sessions."""
        for session in self._sessions.values():
            await session.close()


@cache
def _response_class() -> type[ClientResponse]:
    from aiohttp import ClientResponse

    class Response(ClientResponse):
        """Knows the address of the server that redirects, which its connection no longer does once it is released."""

        peer: str | None = None

        async def start(self, connection: Any) -> ClientResponse:
            transport = connection.transport
            await super().start(connection)
            if self.status in _REDIRECTS and transport is not None:
                self.peer = str((transport.get_extra_info("peername") or ("",))[0])
            return self

    return Response


@lru_cache(maxsize=64)
def _patience(seconds: float | None) -> ClientTimeout:
    """Allows ``seconds`` to connect, and as many for each part of the response."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, connect=seconds, sock_read=seconds)


@asynccontextmanager
async def answered(
    web: Web, request: HttpRequest, *, seconds: float | None, follow: bool = False
) -> AsyncIterator[ClientResponse]:
    """Yields the response with its body still unread; follows redirects if ``follow`` is set.

    Only the origin of the first request receives its body and headers, apart from a few that describe the wanted
    response. A public address cannot redirect to a private one.

    Args:
        seconds: time limit for connecting, and for each part of the response; None: the caller has a limit.

    Raises:
        WebError: there is no response, or its body broke off while the caller read it.
    """
    import aiohttp

    response = None
    try:
        response = await _final(web, request, seconds, follow)
        yield response
    except TimeoutError as error:  # of aiohttp, for which it is a client error too
        raise WebError(f"{type(error).__name__}", late=True) from error
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise WebError("the address is not one of http or https", retryable=False) from error
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, RefusedAddressError):
            raise WebError(str(error.os_error), retryable=False) from error
        raise WebError(f"{type(error).__name__}: {error}") from error
    finally:
        if response is not None:
            response.release()


async def _final(web: Web, request: HttpRequest, seconds: float | None, follow: bool) -> ClientResponse:
    import aiohttp

    jar: aiohttp.CookieJar | None = None  # for this chain of redirects
    destinations = web.anywhere
    for _ in range(MAX_REDIRECTS + 1):
        proxy = _proxy(request.url)
        if destinations.are_bounded and (reason := destinations.refusal_of_host(request.url.host or "")):
            raise WebError(reason, retryable=False)
        session = web.session(None if proxy is not None and destinations.are_bounded else destinations)
        response = await session.request(
            request.method,
            request.url,
            headers=request.headers,
            data=request.body,
            cookies=None if jar is None else jar.filter_cookies(request.url),
            timeout=_patience(seconds),
            proxy=proxy,
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
            jar = aiohttp.CookieJar(unsafe=True) if jar is None else jar  # addresses without a name too
            jar.update_cookies(response.cookies, response.url)
        response.release()
        if not same_origin(request.url, following.url) and _is_public(web, response, proxy):
            destinations = web.public
        request = following
    raise WebError(f"more than {MAX_REDIRECTS} redirects", retryable=False)


def _is_public(web: Web, response: ClientResponse, proxy: str | None) -> bool:
    """Reports whether the server of a redirect has a public address, or one that is not known."""
    host = (response.url.host or "") if proxy is not None else getattr(response, "peer", None)
    return not host or web.public.refusal_of_host(host) is None


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
    status = response.status
    if status not in _REDIRECTS or (location := response.headers.get("Location")) is None:
        return None
    url = request.url.join(address(location))
    if url.scheme not in ("http", "https"):
        raise WebError(f"it redirects to {url.scheme}:, which is neither http nor https", retryable=False)
    if request.url.fragment and not url.fragment:
        url = url.with_fragment(request.url.fragment)
    headers, method, body = dict(request.headers), request.method, request.body
    is_same = same_origin(url, request.url)
    if not is_same:
        passed_on = {name: value for name, value in headers.items() if name.lower() in _FOR_ANY_ORIGIN}
        passed_on = _without(passed_on, request.secrets)
        headers = {name: value for name, value in passed_on.items() if SECRETS.redact(value) == value}
    if method not in ("GET", "HEAD") and (status in (302, 303) or (status == 301 and method == "POST")):
        headers, method, body = _without(headers, _ABOUT_THE_BODY), "GET", None
    if not is_same and (method not in ("GET", "HEAD") or body is not None):
        raise WebError(
            f"it redirects a {method} with status {status} to {public(url.with_query(None))}, another origin, which "
            "must not receive the request; use that address if it is the right one",
            retryable=False,
        )
    return request._replace(method=method, url=url, headers=headers, body=body)


def _without(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in names}


def address(url: str, params: Mapping[str, Any] | None = None) -> URL:
    """Returns an address with ``params`` in its query; characters that cannot be sent are percent-encoded.

    Parameters replace those of the same name; a list becomes one for each of its values that is not null.

    Raises:
        ValueError: it is no address.
    """
    encoded = _SENDABLE.fullmatch(url) is not None
    pairs = _pairs(params or {})
    if not pairs:
        return URL(url, encoded=encoded)
    if encoded and "?" not in url and "#" not in url:
        return URL(f"{url}?{_query(pairs)}", encoded=True)
    written = URL(url, encoded=encoded)
    before = parse_qsl(written.raw_query_string, keep_blank_values=True)
    replaced = {name for name, _ in pairs}
    unchanged = [(name, text) for name, text in before if name not in replaced]
    bare = written.with_query(None).with_fragment(None)
    return URL(f"{bare}?{_query(unchanged + pairs)}", encoded=True)


def form_encoded(fields: Mapping[str, Any]) -> bytes:
    """Returns the body of a form; a list becomes one field for each of its values that is not null."""
    return urlencode(_pairs(fields)).encode()


def _query(pairs: Iterable[tuple[str, str]]) -> str:
    return "&".join([f"{_quoted(name)}={_quoted(text)}" for name, text in pairs])


def _pairs(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in fields.items():
        if value.__class__ is str:  # most
            pairs.append((str(name), value))
        else:
            items = value if isinstance(value, list | tuple) else (value,)
            pairs += [(text_of(name), text_of(item)) for item in items if item is not None]
    return pairs


def header_texts(headers: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of headers, without those that are null.

    Raises:
        ValueError: a value is a list or mapping, which no header can be.
    """
    for name, value in headers.items():
        if isinstance(value, Mapping | list | tuple):
            message = f"headers.{name} is {described(value)}, and a header is one text; write '| tojson' or '| join'"
            raise ValueError(message)
    return {text_of(name): text_of(value) for name, value in headers.items() if value is not None}


def same_origin(one: URL, other: URL) -> bool:
    """Reports whether two addresses have the same scheme, host and port."""
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def public(url: URL) -> str:
    """Returns an address without user name and password."""
    return str(url.with_user(None)) if url.raw_user or url.raw_password else str(url)


def body_blocks(response: ClientResponse) -> AsyncIterator[bytes]:
    """Returns the blocks of a body, decompressed.

    Raises:
        WebError: the compression is not supported, or the compressed bytes end too early or are damaged.
    """
    coding, blocks = response.headers.get("Content-Encoding", "").strip().lower(), response.content.iter_any()
    if coding in _NOT_READ and response.status < 400:  # a refusal is one without its text, too
        message = f"its Content-Encoding {coding} is not supported; send the header Accept-Encoding: gzip"
        raise WebError(message, retryable=False)
    return _decompressed(blocks, _COMPRESSIONS[coding]) if coding in _COMPRESSIONS else blocks


async def _decompressed(blocks: AsyncIterator[bytes], compression: str) -> AsyncIterator[bytes]:
    unpacker = None
    try:
        async for block in blocks:
            if unpacker is None:  # some servers send deflate without the header of zlib
                is_raw = compression == "deflate" and block[0] & 0x0F != 8
                unpacker = Unpacker(RAW_DEFLATE if is_raw else compression)
            for piece in unpacker.pieces(block):
                yield piece
        if unpacker is not None:
            unpacker.close()
    except FormatError as error:
        raise WebError(f"its body was cut or damaged: {error}") from error


async def bounded_body(response: ClientResponse, most: int) -> bytes:
    """Returns the decompressed body of a response.

    Raises:
        WebError: it has more than ``most`` bytes; the rest is not read.
    """
    body = bytearray()
    async for block in body_blocks(response):
        body += block
        if len(body) > most:
            response.close()
            raise WebError(f"its body has more than {most} bytes (NOETL_HTTP_BODY_BYTES)", retryable=False)
    return bytes(body)
