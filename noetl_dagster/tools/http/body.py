"""The body of an HTTP response: as a value, as a stored result, or as rows in chunks."""

from __future__ import annotations

import asyncio
import base64
import codecs
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from yarl import URL

from noetl_dagster.errors import ToolError
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import codec
from noetl_dagster.storage.exact_json import InexactNumberError, Numbers, loads_exact
from noetl_dagster.tools.access.web import body_blocks, public
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.rows.cutters import Piece, begins_array, cutter_for, ends_value
from noetl_dagster.tools.rows.formats import BlockOrigin, RowFormat, json_rows

if TYPE_CHECKING:
    from aiohttp import ClientResponse

EXCERPT = 300
_LOOK = 1024  # bytes of a body that show its kind
TEXT = "text"
"""The ``format`` of a body that stays text, whatever its type says."""

_NOT_STREAMED = (StoreTier.EVENTLOG, StoreTier.MEMORY)
_ROW_TYPES = {
    "application/x-ndjson": RowFormat.JSONL,
    "application/ndjson": RowFormat.JSONL,
    "application/jsonl": RowFormat.JSONL,
    "application/x-jsonlines": RowFormat.JSONL,
    "text/csv": RowFormat.CSV,
}
_TEXT_TYPES = ("text/", "json", "xml", "javascript", "x-www-form-urlencoded", "yaml", "graphql")


class HttpResponse(NamedTuple):
    """A response without secrets.

    Attributes:
        data: the parsed body; None of a refusal.
        text: the beginning of a refusal's body.
        links: the addresses of the header ``Link``, by their relation (RFC 8288).
        encoding: ``base64`` or ``reference`` if ``data`` is not the body itself.
    """

    status: int
    reason: str
    headers: dict[str, str]
    url: str
    data: Any
    text: str
    encoding: str | None
    links: dict[str, str]


class ResponseBody:
    """The body of a response; its beginning can be examined before it is consumed.

    Attributes:
        has_ended: nothing follows the beginning.
    """

    def __init__(self, response: ClientResponse) -> None:
        self.response = response
        self.has_ended = False
        self._begun: list[bytes] = []
        self._size = 0
        self._following = body_blocks(response)
        self._is_plain = "Content-Encoding" not in response.headers

    async def beginning(self, most: int) -> bytes:
        """Returns the whole body, or at least ``most`` bytes of a longer one."""
        while self._size <= most and not self.has_ended:
            block = await anext(self._following, None)
            if block is None:
                self.has_ended = True
            else:
                self._begun.append(block)
                self._size += len(block)
                self.has_ended = self._size <= most and self._is_plain and self.response.content.at_eof()
        if len(self._begun) > 1:
            self._begun = [b"".join(self._begun)]
        return self._begun[0] if self._begun else b""

    async def blocks(self) -> AsyncIterator[bytes]:
        """Yields the whole body without keeping it."""
        begun, self._begun, self._size = self._begun, [], 0
        for block in begun:
            yield block
        async for block in self._following:
            yield block


async def read_response(body: ResponseBody, call: ToolCall, context: ToolContext) -> HttpResponse:
    """Reads a response; a body above ``NOETL_HTTP_BODY_BYTES`` goes to the result store."""
    response = body.response
    headers, url = _headers(response), public(response.url)
    content = await body.beginning(context.settings.http_body_bytes)
    failed = response.status >= 400
    if failed:
        data = encoding = None
    elif body.has_ended:
        data, encoding = _value(content, response, call)
    else:  # it is stored while it arrives
        spec = call.task.spec.result
        ref = await context.results.put_stream(
            body.blocks(),
            execution_id=call.execution_id,
            step=call.step,
            name=f"{spec.name or call.task.name}-body",
            spec=spec.model_copy(update={"name": None}),
            tier=context.settings.default_store_tier if spec.store in _NOT_STREAMED else None,
            content_type=_stored_type(response, call),
        )
        data, encoding = ref.model_dump(mode="json", exclude_defaults=True), "reference"
    text = SECRETS.redact(_readable(content, response))[:EXCERPT] if failed else ""
    links = _links(response) if "link" in headers else {}
    together = "\n".join((url, *headers.values()))
    if SECRETS.redact(together) is not together:  # in most nothing is found: one search for all of them
        url, headers = SECRETS.redact(url), {name: SECRETS.redact(value) for name, value in headers.items()}
        links = {relation: SECRETS.redact(address) for relation, address in links.items()}
    return HttpResponse(response.status, response.reason or "", headers, url, data, text, encoding, links)


def _links(response: ClientResponse) -> dict[str, str]:
    """Returns absolute addresses; a link may have several relations. A header that cannot be read has none."""
    with suppress(ValueError):
        links = [(relations, public(cast(URL, link["url"]))) for relations, link in response.links.items()]
        return {relation: address for relations, address in links for relation in relations.split()}
    return {}


def _headers(response: ClientResponse) -> dict[str, str]:
    """Returns the headers by lower-case name, joined where a name repeats."""
    headers: dict[str, str] = {}
    for name, value in response.headers.items():
        key = name.lower()
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    return headers


async def format_of_body(
    body: ResponseBody, chunks: ChunkedResult, call: ToolCall, context: ToolContext
) -> RowFormat | None:
    """Returns the row format of a body by its type: of JSON arrays, and of other types if a step consumes chunks."""
    if call.config.get("format") == TEXT:
        return None
    media_type = _media_type(body.response)
    if media_type != "application/json" and not media_type.endswith("+json"):
        return _ROW_TYPES.get(media_type) if chunks.wanted else None
    if chunks.wanted:
        is_array = chunks.position is not None or begins_array(await body.beginning(_LOOK))
        return RowFormat.JSON if is_array else None
    beginning = await body.beginning(chunks.most_bytes)
    if begins_array(beginning) and not body.has_ended and not ends_value(beginning):
        # a large value, which may be all there is
        beginning = await body.beginning(context.settings.http_body_bytes)
    is_array = not body.has_ended and begins_array(beginning) and ends_value(beginning)
    return RowFormat.JSON if is_array else None


async def take_rows(body: ResponseBody, format: RowFormat, chunks: ChunkedResult, call: ToolCall, where: str) -> None:
    """Cuts the body into chunks as it arrives; each is stored before more than one further chunk is read.

    Raises:
        ToolError: the body is not of the format, or has changed.
        WebError: the connection broke off.
    """
    response, at = body.response, chunks.position
    if at is not None and not response.headers.get("Content-Range", "").startswith(f"bytes {at['offset']}-"):
        await chunks.begin_again()
        at = None
    version = at["version"] if at is not None else _version(response)
    encoding = str(call.config.get("charset") or response.charset or "utf-8")
    if _decoded(b"\n   ", response, call, encoding)[0] != "\n":
        raise _parse_error(response, f"rows in {encoding} cannot be cut; leave 'format' out, or write format: text")
    numbers = call.word("numbers", Numbers, Numbers.EXACT)
    cutter = cutter_for(format, chunks.most_bytes, at or {}, where, encoding, numbers=numbers)

    def gathered(piece: Piece, *, full: bool) -> Gathered:
        position = {"offset": piece.offset, "version": version, "columns": cutter.columns}
        return Gathered(piece.rows, None if version is None else position, full)

    async for data in body.blocks():
        for piece in await asyncio.to_thread(list, cutter.feed(data)):
            await chunks.put(gathered(piece, full=True))
    if (rest := cutter.end()) is not None:
        await chunks.put(gathered(rest, full=False))


def _media_type(response: ClientResponse) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _stored_type(response: ClientResponse, call: ToolCall) -> str:
    if call.config.get("format") == TEXT:
        return codec.TEXT
    media_type = _media_type(response)
    return codec.JSON_OF_OTHERS if media_type == codec.JSON else media_type or codec.BINARY


def _version(response: ClientResponse) -> str | None:
    """Returns the validator of a later partial response; None if the server does not support ranges."""
    headers = response.headers
    if response.method != "GET" or "Content-Encoding" in headers or headers.get("Accept-Ranges") != "bytes":
        return None
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else headers.get("Last-Modified")


def _value(content: bytes, response: ClientResponse, call: ToolCall) -> tuple[Any, str | None]:
    """Returns the value of a body: of JSON as its type says, else text, else base64 with that word.

    Raises:
        ToolError: the body is not what its type says, or has numbers that would change.
    """
    media_type, is_text = _media_type(response), call.config.get("format") == TEXT
    is_json = "json" in media_type and media_type not in _ROW_TYPES and not is_text
    is_unnamed = not (media_type or is_text)
    if not content or (is_json and not content.strip()):
        return None, None
    if is_json or is_text or is_unnamed or response.charset or any(part in media_type for part in _TEXT_TYPES):
        try:
            text = _decoded(content, response, call, json.detect_encoding(content) if is_json else "utf-8")
        except ToolError:
            if not is_unnamed:
                raise
        else:
            return (_parsed(text, response, call, or_text=is_unnamed) if is_json or is_unnamed else text), None
    return base64.b64encode(content).decode(), "base64"


def _decoded(content: bytes, response: ClientResponse, call: ToolCall, default: str) -> str:
    """Returns the text of a body in the encoding of the call, of its type, of its first bytes, or else the default."""
    is_marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = call.config.get("charset") or response.charset or ("utf-16" if is_marked else default)
    try:
        return content.decode(str(encoding)).removeprefix("\ufeff")
    except (LookupError, UnicodeError) as error:
        remedy = "write the encoding that it has, such as charset: latin-1"
        raise _parse_error(response, f"its body is no text in {encoding} ({error}); {remedy}") from None


def _parsed(text: str, response: ClientResponse, call: ToolCall, *, or_text: bool) -> Any:
    try:
        return loads_exact(text, call.word("numbers", Numbers, Numbers.EXACT))
    except InexactNumberError as error:
        raise _parse_error(response, f"its body would change: {error}") from None
    except ValueError as error:
        if or_text:
            return text
        remedy = "write format: text to get it as text"
        with suppress(ToolError):
            json_rows(text.encode().split(b"\n"), BlockOrigin(""))
            remedy = "each of its lines is: write format: jsonl"
        excerpt = SECRETS.beginning(text, 80)
        message = f"its body is not JSON, as its type says ({error}): {excerpt!r}; {remedy}"
        raise _parse_error(response, message) from None


def _parse_error(response: ClientResponse, message: str) -> ToolError:
    return ToolError(
        f"{response.method} {public(response.url)} answered {response.status}, but {message}", kind="parse"
    )


def _readable(content: bytes, response: ClientResponse) -> str:
    """Returns the text of a refusal, with marks for what cannot be read; empty for other bodies."""
    media_type = _media_type(response)
    if media_type and not response.charset and not any(part in media_type for part in _TEXT_TYPES):
        return ""
    try:
        return content.decode(response.charset or "utf-8", errors="replace")
    except LookupError:  # an unknown encoding
        return content.decode(errors="replace")
