"""``S3Resource`` of dagster-aws leads the IO manager of MinIO where it would lead a client of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from dagster import (
    ConfigurableResource,
    DagsterInstance,
    Definitions,
    EnvVar,
    asset,
    materialize,
)
from dagster_aws.s3 import S3Resource
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noetl_dagster import MinioIOManager
from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings
from noetl_dagster.storage import locations
from tests.embedded.peers import s3_client
from tests.serving import served

FRAME = pd.DataFrame({"id": [1, 2, 3]})


@asset
def numbers() -> pd.DataFrame:
    return FRAME


@asset
def total(numbers: pd.DataFrame) -> int:
    return int(numbers["id"].sum())


@pytest.fixture(autouse=True)
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of AWS but what a test gives."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def resource(settings: Settings, **more: Any) -> S3Resource:
    given = {
        "endpoint_url": settings.minio_endpoint,
        "region_name": settings.minio_region,
        "aws_access_key_id": settings.minio_access_key,
        "aws_secret_access_key": settings.minio_secret_key.get_secret_value(),
    }
    return S3Resource(**(given | more))


def kept(settings: Settings, s3: Any, instance: DagsterInstance) -> int:
    """Materialises the assets with a resource; gives the total as it is stored."""
    manager = MinioIOManager(s3=s3, bucket=settings.minio_bucket)
    assert materialize([numbers, total], resources={"io_manager": manager}, instance=instance).success
    client, bucket = s3_client(settings), settings.minio_bucket
    pointer = json.loads(client.get_object(Bucket=bucket, Key="assets/total.ref.json")["Body"].read())
    key = pointer["physical_uri"].removeprefix(f"s3://{bucket}/")
    return int(client.get_object(Bucket=bucket, Key=key)["Body"].read())


def test_its_profile_gives_the_keys(settings: Settings, dagster_instance: DagsterInstance, tmp_path: Path) -> None:
    secret = settings.minio_secret_key.get_secret_value()
    (tmp_path / "credentials").write_text(
        f"[lake]\naws_access_key_id = {settings.minio_access_key}\naws_secret_access_key = {secret}\n"
    )
    s3 = S3Resource(endpoint_url=settings.minio_endpoint, profile_name="lake")
    assert kept(settings, s3, dagster_instance) == 6
    with pytest.raises(StorageError, match=r"s3: .*nobody.*check profile_name"):
        kept(
            settings,
            S3Resource(endpoint_url=settings.minio_endpoint, profile_name="nobody"),
            dagster_instance,
        )


def test_the_environment_gives_what_it_leaves_out(
    settings: Settings, dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", settings.minio_endpoint or "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", settings.minio_access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", settings.minio_secret_key.get_secret_value())
    assert kept(settings, S3Resource(), dagster_instance) == 6


def test_it_is_a_resource_of_the_definitions(
    settings: Settings, dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKE_SECRET", settings.minio_secret_key.get_secret_value())
    s3 = resource(settings, aws_secret_access_key=EnvVar("LAKE_SECRET"))
    manager = MinioIOManager(s3=s3, bucket=settings.minio_bucket)
    definitions = Definitions(assets=[numbers, total], resources={"s3": s3, "io_manager": manager})
    job = definitions.resolve_implicit_global_asset_job_def()
    assert job.execute_in_process(instance=dagster_instance).success


def test_one_that_is_configured_at_launch_is_refused(settings: Settings, dagster_instance: DagsterInstance) -> None:
    later = S3Resource.configure_at_launch()
    definitions = Definitions(
        assets=[numbers],
        resources={"s3": later, "io_manager": MinioIOManager(s3=later, bucket=settings.minio_bucket)},
    )
    config = {
        "endpoint_url": settings.minio_endpoint,
        "aws_access_key_id": settings.minio_access_key,
        "aws_secret_access_key": settings.minio_secret_key.get_secret_value(),
    }
    job = definitions.resolve_implicit_global_asset_job_def()
    with pytest.raises(StorageError, match=r"s3 is S3; give an S3Resource .* with its values"):
        job.execute_in_process(run_config={"resources": {"s3": {"config": config}}}, instance=dagster_instance)


class OtherResource(ConfigurableResource):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("s3", "more", "message"),
    [
        ({"use_unsigned_session": True}, {}, "use_unsigned_session: assets are written, which needs keys"),
        ({"max_attempts": 0}, {}, "max_attempts is 0; the first attempt counts"),
        ({"aws_secret_access_key": None}, {}, "aws_secret_access_key is not set, and the other half"),
        (
            {"aws_access_key_id": None, "aws_secret_access_key": None},
            {},
            "no credentials; set aws_access_key_id",
        ),
        ({"endpoint_url": None, "region_name": None}, {}, "no region; set region_name"),
        ({}, {"endpoint": "http://elsewhere", "region": "x"}, "s3 stands for endpoint, region; give one"),
    ],
)
def test_what_it_cannot_be_is_said(settings: Settings, s3: dict[str, Any], more: dict[str, Any], message: str) -> None:
    manager = MinioIOManager(s3=resource(settings, **s3), bucket=settings.minio_bucket, **more)
    with pytest.raises(StorageError, match=message):
        manager.store_settings()
    with pytest.raises(StorageError, match="s3 is OtherResource; give an S3Resource"):
        MinioIOManager(s3=OtherResource(), bucket="lake").store_settings()


def test_amazons_own_endpoint(settings: Settings) -> None:
    s3 = resource(settings, endpoint_url=None, region_name="eu-west-1")
    assert MinioIOManager(s3=s3, bucket="lake").store_settings().minio_endpoint == (
        "https://s3.eu-west-1.amazonaws.com"
    )


class Store:
    """A store that fails, and remembers what it was asked with."""

    def __init__(self) -> None:
        self.tokens: list[str | None] = []

    async def answer(self, request: Request) -> Response:
        self.tokens.append(request.headers.get("x-amz-security-token"))
        return Response(status_code=503)


def test_its_token_and_its_attempts_count(settings: Settings, dagster_instance: DagsterInstance) -> None:
    store = Store()
    methods = ["GET", "PUT", "HEAD"]
    with served(Starlette(routes=[Route("/{path:path}", store.answer, methods=methods)])) as url:
        s3 = resource(settings, endpoint_url=url, aws_session_token="for-an-hour", max_attempts=2)
        with pytest.raises(StorageError):
            kept(settings, s3, dagster_instance)
    assert store.tokens == ["for-an-hour"] * 2


def test_certificates_are_looked_at_unless_it_says_no(settings: Settings) -> None:
    secure = resource(settings, endpoint_url="https://minio:9000", verify=False)
    own = MinioIOManager(s3=secure, bucket="lake").store_settings()
    assert not own.minio_verify
    with pytest.raises(StorageError, match="without checking its certificate"):
        locations.dataset(own, "s3://lake/assets/frame/", ("part.parquet",))
    assert MinioIOManager(s3=resource(settings), bucket="lake").store_settings().minio_verify
