"""Stores that a service looks at when it starts: buckets are made where they may be, and named where not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers import configured, open_tier, probe, unready
from tests.conftest import aws_environment


async def test_a_missing_bucket_is_made(settings: Settings) -> None:
    assert await unready(settings) == []

    # with this tier's own client of a bucket that nobody else makes
    tier = open_tier(StoreTier.S3, settings.model_copy(update={"s3_bucket": settings.minio_bucket}), None)
    await tier.ready()


@pytest.fixture(autouse=True)
def aws(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_environment(settings).items():
        monkeypatch.setenv(name, value)


async def test_a_bucket_that_is_not_ours_to_make_is_named(settings: Settings) -> None:
    (line,) = await unready(settings.model_copy(update={"s3_bucket": "nobodys"}))

    assert line == "s3 tier: no bucket nobodys; create it"


async def test_what_cannot_be_used_has_a_line_each(settings: Settings, tmp_path: Path) -> None:
    changes = {"minio_secret_key": SecretStr("wrong"), "pvc_mount_path": tmp_path / "not-mounted"}

    minio, pvc = await unready(settings.model_copy(update=changes))

    assert "access denied (SignatureDoesNotMatch); check the key pair" in minio
    assert "is not mounted; mount it or set NOETL_PVC_MOUNT_PATH" in pvc


async def test_a_probe_leaves_nothing(settings: Settings) -> None:
    for tier in configured(settings):
        place = await probe(tier, settings)
        opened = open_tier(tier, settings, None)
        assert opened.uri("") == place
        assert [key async for page in opened.keys("") for key in page] == []
