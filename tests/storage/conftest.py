"""Fixtures of the storage tests: a store on the real services, and a way to count what is recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.store import ResultStore
from tests.tiers import google, settings

__all__ = ["google", "settings"]

LASTING = (
    StoreTier.MINIO,
    StoreTier.PVC,
    StoreTier.DISK,
    StoreTier.KV,
    StoreTier.DB,
    StoreTier.DUCKDB,
    StoreTier.S3,
    StoreTier.GCS,
)
"""Tiers whose bytes stay in a store of their own when a process ends."""


@pytest.fixture
async def store(settings: Settings, pool: asyncpg.Pool) -> AsyncIterator[ResultStore]:
    async with ResultStore(settings, pool) as opened:
        yield opened
