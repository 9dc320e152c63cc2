"""The embedded S3 holds many small buckets, and keeps strangers out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import boto3
import pytest
from botocore.exceptions import ClientError

from noetl_dagster.settings import Settings
from tests.embedded.peers import s3_client

BUCKETS = 200


@pytest.mark.slow
def test_hundreds_of_buckets_come_and_go(running: Settings) -> None:
    client = s3_client(running)

    def fill(number: int) -> int:
        bucket = f"many-{number}"
        client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key="deep/er/key", Body=b"x" * 20_000)
        return len(client.get_object(Bucket=bucket, Key="deep/er/key")["Body"].read())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(fill, range(BUCKETS))) == [20_000] * BUCKETS
        list(threads.map(lambda number: client.delete_bucket(Bucket=f"many-{number}"), range(BUCKETS)))
    left = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    assert not {name for name in left if name.startswith("many-")}
    client.create_bucket(Bucket="one-more")
    client.put_object(Bucket="one-more", Key="key", Body=b"still room")


def test_wrong_key_is_refused(running: Settings) -> None:
    stranger = boto3.client(
        "s3",
        endpoint_url=running.minio_endpoint,
        aws_access_key_id=running.minio_access_key,
        aws_secret_access_key="a guess",
        region_name=running.minio_region,
    )
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        stranger.list_buckets()
