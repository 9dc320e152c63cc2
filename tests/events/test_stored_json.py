"""The stored form of a value is what the log returns."""

from __future__ import annotations

from typing import Any

import asyncpg
import orjson

from noetl_dagster.values import admit

VALUES: list[Any] = [
    {"status": "ok", "data": [{"price": 1, "id": 2, "ab": None, "Z": True, "é": "x", "": 0}]},
    [1.0, -0.0, 0.1, 1e15, 1e16, -1e16, 123456789012345678.0, 9e18, -9.3e18, 1.8e19, 1e20, 1e300, 5e-324, 1e-7],
    [2**63 - 1, -(2**63), 2**64 - 1, 0],
    {"nested": {"bb": [{"c": {}, "a": []}], "a": "\U0001f600"}},
    {1: "number", "text": (1, 2)},
    "text",
    None,
]


async def test_it_is_the_same_as_after_a_read(pool: asyncpg.Pool[Any]) -> None:
    for value in VALUES:
        read = await pool.fetchval("SELECT $1::jsonb", admit(value))
        # repr tells 1 from 1.0, and shows the order of keys
        assert repr(admit(value)) == repr(read)
        assert orjson.dumps(admit(value)) == orjson.dumps(read)
