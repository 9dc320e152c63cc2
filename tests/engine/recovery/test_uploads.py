"""Uploads to a bucket whose process is killed: the object is whole or missing, and whole in the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers.objects import S3Bucket, minio_store
from tests.engine.recovery.killed import EXECUTION, die, killed

pytestmark = pytest.mark.long

CONTENT = bytes(range(256)) * (20 << 12)  # 20 MB: several parts
UPLOAD = """
workflow:
  - step: upload
    tool: {kind: s3, operation: upload, source: FOLDER/large.bin, key: large.bin}
"""


def die_in_upload(moment: str) -> None:
    from noetl_dagster.storage.tiers import objects
    from noetl_dagster.tools.buckets import operations

    read, write = operations._SentFile.read, objects.S3Bucket.write
    seen: Counter[str] = Counter()

    def reading(self: Any, size: int | None = -1, /) -> bytes:
        seen["reads"] += 1
        if moment == "within the upload" and self.tell() > len(CONTENT) // 2:
            die()
        return read(self, size)

    def written(*arguments: Any) -> str:
        tag = write(*arguments)
        assert seen["reads"] > 1
        die()
        return tag

    operations._SentFile.read = reading  # type: ignore[method-assign]
    objects.S3Bucket.write = written  # type: ignore[method-assign]


@pytest.mark.parametrize(("moment", "is_there"), [("within the upload", False), ("after the upload", True)])
async def test_an_upload_that_is_killed(
    settings: Settings, engine: Engine, pool: asyncpg.Pool, tmp_path: Path, moment: str, is_there: bool
) -> None:
    (tmp_path / "large.bin").write_bytes(CONTENT)
    await engine.runtime.tool_context.results.ready(StoreTier.MINIO)
    store = S3Bucket(minio_store(settings))

    await killed(settings, UPLOAD.replace("FOLDER", str(tmp_path)), die_in_upload, moment)
    assert store.exists("large.bin") == is_there
    state = await engine.resume(await pool.fetchval(EXECUTION))

    assert state.error is None
    assert state.latest["upload"].envelope["data"]["bytes"] == len(CONTENT)
    assert store.read("large.bin") == CONTENT
