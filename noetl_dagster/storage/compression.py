"""Compresses and decompresses stored bytes, whole or as streams in constant memory."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import lz4.frame

from noetl_dagster.errors import FormatError
from noetl_dagster.storage.tiers.base import Bytes

_GZIP_WINDOW = 16 + zlib.MAX_WBITS

RAW_DEFLATE = "raw deflate"
_WINDOWS = {"gzip": _GZIP_WINDOW, "deflate": zlib.MAX_WBITS, RAW_DEFLATE: -zlib.MAX_WBITS}
"""The compressions of zlib: ``gzip`` of stored bytes, and all of them in HTTP."""

_PIECE = 4 * 1024 * 1024
"""Maximum of bytes that are decompressed at a time: a few bytes may expand to a thousand times as many."""


class Compression(StrEnum):
    """The compressions of stored bytes."""

    NONE = "none"
    GZIP = "gzip"
    LZ4 = "lz4"


@contextmanager
def one_format(name: str) -> Iterator[None]:
    """Raises what a parser raises about bytes of another format as ``FormatError``.

    Parsers of JSON, Arrow and LZ4 raise subclasses of ``ValueError``, ``OSError`` and ``RuntimeError``, or their own.
    """
    try:
        yield
    except (FormatError, MemoryError):
        raise
    except (ValueError, ArithmeticError, LookupError, OSError, EOFError, RuntimeError, TypeError, zlib.error) as error:
        raise FormatError(f"the bytes are no valid {name} ({error})") from error


def compress(data: Bytes, compression: Compression) -> Bytes:
    """Returns compressed bytes."""
    if compression is Compression.GZIP:
        return gzip.compress(data, compresslevel=6, mtime=0)
    if compression is Compression.LZ4:
        return lz4.frame.compress(data)  # type: ignore[no-any-return]
    return data


def decompress(data: Bytes, compression: str) -> Bytes:
    """Undoes :func:`compress`; raises as :func:`decode`."""
    kind = compression_of(compression)
    if kind is Compression.NONE:
        return data
    unpacker = Unpacker(kind)
    pieces = unpacker.pieces(data)
    first = next(pieces, b"")
    whole = bytearray()
    for piece in pieces:
        whole += piece if whole else first + piece
    unpacker.close()
    return memoryview(whole) if whole else first


def compression_of(name: str) -> Compression:
    """Returns the compression with a name; raises ``FormatError`` if there is none."""
    try:
        return Compression(name)
    except ValueError:
        supported = ", ".join(Compression)
        raise FormatError(f"the compression {name!r:.40} is unknown; this version reads {supported}") from None


def compress_stream(chunks: AsyncIterable[Bytes], compression: Compression) -> AsyncIterable[Bytes]:
    """Compresses a stream in constant memory."""
    if compression is Compression.NONE:
        return chunks
    if compression is Compression.GZIP:
        packer = zlib.compressobj(level=6, wbits=_GZIP_WINDOW)
        return _passed(chunks, packer.compress, end=packer.flush)
    frame = lz4.frame.LZ4FrameCompressor()
    return _passed(chunks, frame.compress, begin=frame.begin, end=frame.flush)


async def decompress_stream(chunks: AsyncIterable[Bytes], compression: str) -> AsyncIterator[Bytes]:
    """Undoes :func:`compress_stream`, and :func:`compress` too, in constant memory; raises as :func:`decode`."""
    kind = compression_of(compression)
    if kind is Compression.NONE:
        async for chunk in chunks:
            yield chunk
        return
    unpacker = Unpacker(kind)
    async for chunk in chunks:
        pieces = unpacker.pieces(chunk)
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield piece
    unpacker.close()


class Unpacker:
    """Decompresses a stream of one or more members in pieces of at most :data:`_PIECE` bytes.

    Args:
        compression: ``gzip``, ``deflate``, ``raw deflate`` or ``lz4``.
    """

    def __init__(self, compression: str) -> None:
        self._compression = compression
        self._member = self._begin()

    def close(self) -> None:
        """Raises ``FormatError`` if the stream has ended before the end of a member."""
        if not self._member.eof:
            raise FormatError(f"the bytes are no valid {self._compression} (they end early)")

    def pieces(self, data: Bytes) -> Iterator[bytes]:
        """Yields what a chunk of the stream adds."""
        with one_format(self._compression):
            while data:
                if self._member.eof:
                    self._member = self._begin()
                piece = self._member.decompress(data, _PIECE)
                while piece:
                    yield piece
                    piece = self._more()
                data = self._member.unused_data or b"" if self._member.eof else b""

    def _begin(self) -> Any:
        if (window := _WINDOWS.get(self._compression)) is not None:
            return zlib.decompressobj(wbits=window)
        return lz4.frame.LZ4FrameDecompressor()

    def _more(self) -> bytes:
        """Returns a further piece of the data that the member has taken."""
        if self._member.eof:  # zlib would take what follows a second time
            return b""
        if self._compression in _WINDOWS:
            return bytes(self._member.decompress(self._member.unconsumed_tail, _PIECE))
        return b"" if self._member.needs_input else bytes(self._member.decompress(b"", _PIECE))


async def _passed(
    chunks: AsyncIterable[Bytes],
    work: Callable[[Bytes], bytes],
    *,
    begin: Callable[[], bytes] = bytes,
    end: Callable[[], bytes] = bytes,
) -> AsyncIterator[Bytes]:
    """Yields the bytes of ``begin``, every chunk processed by ``work`` on a thread, and the bytes of ``end``."""
    if head := begin():
        yield head
    async for chunk in chunks:
        if passed := await asyncio.to_thread(work, chunk):
            yield passed
    if tail := end():
        yield tail
