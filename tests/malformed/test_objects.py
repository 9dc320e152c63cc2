"""Stored results whose bytes or references are damaged."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import lz4.frame
import pyarrow as pa
import pytest

from noetl_dagster.errors import IntegrityError, StorageError
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import codec, compression
from noetl_dagster.storage.codec import BINARY, JSON, JSON_LINES, PARQUET, TEXT
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import NewResult, ResultStore

TABLE = bytes(codec.table_to_parquet(pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})))
ARROW = pa.BufferOutputStream()
with pa.ipc.new_file(ARROW, pa.schema({"a": pa.int64()})) as writer:
    writer.write_table(pa.table({"a": [1]}))

FORMATS: dict[str, dict[str, bytes]] = {
    JSON: {
        "empty": b"",
        "truncated": b'{"a": [1, 2',
        "truncated text": b'{"a": "x',
        "text after its end": b'{"a": 1} x',
        "not a number": b"NaN",
        "single quotes": b"{'a': 1}",
        "half a character": '"\u00e9"'.encode()[:-2],
        "lone surrogate": b'"\\ud800"',
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "deep": b"[" * 100_000,
        "an array of lines that is damaged": b"[" + b"1,\n" * 600_000 + b"x]",
        "Parquet": TABLE,
    },
    JSON_LINES: {
        "truncated": b'{"a": 1}\n{"a":',
        "several values in a line": b'{"a": 1} {"a": 2}\n',
        "a line longer than a block": b'{"a": "' + b"x" * 600_000 + b"\n",
        "damaged in the second block": b'{"a": 1}\n' * 50_000 + b"]\n",
    },
    PARQUET: {
        "empty": b"",
        "its first half": TABLE[: len(TABLE) // 2],
        "without its last byte": TABLE[:-1],
        "a length of its footer beyond the file": TABLE[:-8] + b"\xff\xff\xff\x7fPAR1",
        "a footer of zeros": TABLE[:-58] + bytes(50) + TABLE[-8:],
        "a page of zeros": TABLE[:4] + bytes(60) + TABLE[64:],
        "Arrow": ARROW.getvalue().to_pybytes(),
    },
    TEXT: {"invalid UTF-8": b"\xff", "half a character": "\u00e9".encode()[:1], "UTF-16": "x".encode("utf-16")},
}

COMPRESSED: dict[str, dict[str, bytes]] = {
    "gzip": {
        "empty": b"",
        "without its checksum": gzip.compress(b"1")[:-8],
        "truncated": gzip.compress(b"[" + b"1," * 50_000)[:60],
        "a wrong checksum": gzip.compress(b"1")[:-8] + bytes(8),
        "an unknown method": b"\x1f\x8b\x07" + gzip.compress(b"1")[3:],
        "LZ4": lz4.frame.compress(b"1"),
    },
    "lz4": {
        "empty": b"",
        "truncated": lz4.frame.compress(b"1")[:-5],
        "a wrong block": lz4.frame.compress(b"12" * 5_000)[:20] + b"\xff" * 40,
        "gzip": gzip.compress(b"1"),
    },
    "zstd": {"unknown": b"1"},
    "": {"unknown": b"1"},
    "GZIP": {"unknown": gzip.compress(b"1")},
}


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[ResultStore]:
    """A store on files, without a database."""
    async with ResultStore(Settings(home=tmp_path, embedded=False), None) as store:
        yield store


async def replaced(store: ResultStore, data: bytes, **changes: Any) -> ResultRef:
    """Stores bytes in the place of a result, and returns its reference."""
    ref = await store.put({"a": 1}, execution_id=9, step="load", name="rows", tier=StoreTier.DISK)
    await asyncio.to_thread(Path(ref.physical_uri.removeprefix("file://")).write_bytes, data)
    return ref.model_copy(update={"sha256": None, "bytes_size": len(data), **changes})


async def refused(store: ResultStore, ref: ResultRef, *, streams: bool = False) -> None:
    """Reads a result in every way; each names it, and tells its reader what to do."""

    async def streamed() -> None:
        async for _ in store.stream(ref):
            pass

    async def itemised() -> None:
        async for _ in store.items(ref):
            pass

    for read in (lambda: store.get(ref), itemised, *((streamed, lambda: store.get_bytes(ref)) if streams else ())):
        with pytest.raises(IntegrityError) as caught:
            await read()
        message = str(caught.value)
        assert message.startswith(f"{ref.ref}: ")
        assert ref.physical_uri in message
        assert message.endswith("run the step again")
        assert len(message) < 1_000


CASES = [(kind, "none", name, data) for kind, cases in FORMATS.items() for name, data in cases.items()] + [
    (JSON, kind, name, data) for kind, cases in COMPRESSED.items() for name, data in cases.items()
]


@pytest.mark.parametrize(
    ("content_type", "compressed", "name", "data"), CASES, ids=[" ".join(one[:3]) for one in CASES]
)
async def test_damaged_bytes(disk: ResultStore, content_type: str, compressed: str, name: str, data: bytes) -> None:
    ref = await replaced(disk, data, content_type=content_type, compression=compressed)
    await refused(disk, ref, streams=compressed != "none")


@pytest.mark.parametrize("size", [0, 10, 2 * 1024**2], ids=["empty", "small", "large"])
@pytest.mark.parametrize("content_type", [JSON, BINARY, JSON_LINES])
async def test_other_bytes_than_those_of_the_checksum(disk: ResultStore, size: int, content_type: str) -> None:
    ref = await replaced(disk, b"1" * size, content_type=content_type, sha256="0" * 64)
    await refused(disk, ref, streams=True)


@pytest.mark.parametrize("kind", ["gzip", "lz4"])
async def test_what_expands_to_much_is_decompressed_in_pieces(kind: str) -> None:
    plain = bytes(9 * 1024**2)
    packed = bytes(compression.compress(plain, compression.Compression(kind)))

    async def chunks() -> AsyncIterator[bytes]:
        yield packed

    pieces = [len(piece) async for piece in compression.decompress_stream(chunks(), kind)]
    assert sum(pieces) == len(plain)
    assert max(pieces) <= 4 * 1024**2
    assert bytes(compression.decompress(packed + packed, kind)).count(0) == 2 * len(plain)


# -- references -----------------------------------------------------------------------------------------

CHANGES = {
    "a part that is gone": "DELETE FROM noetl.result_ref WHERE name = 'second'",
    "a part fewer": "DELETE FROM noetl.manifest_part WHERE part_index = 2",
    "a part with other bytes": "UPDATE noetl.result_ref SET sha256 = repeat('0', 64) WHERE name = 'second'",
    "a part of another format": (
        "UPDATE noetl.result_ref SET content_type = 'application/vnd.apache.parquet' WHERE name = 'second'"
    ),
    "a part with another compression": "UPDATE noetl.result_ref SET compression = 'zstd' WHERE name = 'second'",
    "a manifest in itself": "UPDATE noetl.manifest_part SET part_ref_id = manifest_id WHERE part_index = 1",
    "manifests in each other": """
        WITH made AS (INSERT INTO noetl.manifest SELECT ref_id, 'append' FROM noetl.result_ref WHERE name = 'second'),
             other AS (UPDATE noetl.result_ref SET kind = 'manifest' WHERE name = 'second' RETURNING ref_id)
        INSERT INTO noetl.manifest_part SELECT ref_id, 0, $1 FROM other
    """,
    "an unknown strategy": """UPDATE noetl.result_ref SET extra = '{"strategy": "zip"}' WHERE kind = 'manifest'""",
    "a strategy of the wrong type": """UPDATE noetl.result_ref SET extra = '{"strategy": [1]}' WHERE kind = 'manifest'""",
    "fields around its rows that are none": """UPDATE noetl.result_ref SET extra = '{"around": 1}' WHERE kind = 'manifest'""",
}


@pytest.mark.parametrize("strategy", [Strategy.APPEND, Strategy.CONCAT])
async def test_damaged_manifests(settings: Settings, pool: asyncpg.Pool, strategy: Strategy) -> None:
    async with ResultStore(settings, pool) as store:
        for name, change in CHANGES.items():
            parts = [NewResult([part], 9, "load", part, tier=StoreTier.DISK) for part in ("first", "second", "third")]
            ref = await store.manifest(9, "load", "rows", await store.put_many(parts), strategy)
            await pool.execute("SET CONSTRAINTS ALL DEFERRED")
            await pool.execute(change, *([ref.ref_id] if "$1" in change else []))

            async def itemised(ref: str = ref.ref) -> None:
                async for _ in store.items(ref):
                    pass

            for read in (lambda ref=ref.ref: store.get(ref), itemised, lambda ref=ref.ref: store.get_bytes(ref)):
                with pytest.raises(StorageError) as caught:
                    await read()
                assert "noetl://" in str(caught.value) or "manifest" in str(caught.value), name
            await pool.execute("TRUNCATE noetl.result_ref CASCADE")
