"""Compute logs in a bucket: the manager of dagster-aws, with the keys of the minio tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.session import get_session
from dagster_aws.s3 import S3ComputeLogManager

from noetl_dagster.launcher.compute_logs import RunLogs
from noetl_dagster.settings import Settings, get_settings

CONNECT_SECONDS = 5
SEND_SECONDS = 30
ATTEMPTS = 2
"""Limits of each request: a step does not wait for long for a store that does not answer."""


class StoredRunLogs(S3ComputeLogManager):
    """``S3ComputeLogManager`` that starts no processes to copy the output, and knows the keys of the minio tier.

    With an ``endpoint_url``, it has the keys and the region of ``NOETL_MINIO_*``. Otherwise it has those of the AWS
    environment. Its configuration is that of ``S3ComputeLogManager``, with a ``local_dir``.
    """

    def __init__(self, bucket: str, local_dir: str, endpoint_url: str | None = None, **config: Any) -> None:
        self._run_logs = RunLogs(local_dir)
        settings = get_settings() if endpoint_url else None
        if settings is not None and not settings.minio_verify:
            config["verify"] = False
        with _default_session(settings):
            super().__init__(bucket, local_dir=local_dir, endpoint_url=endpoint_url, **config)

    @property
    def local_manager(self) -> RunLogs:
        """Returns the manager of the files on this machine."""
        return self._run_logs


@contextmanager
def _default_session(settings: Settings | None) -> Iterator[None]:
    """Gives the clients that boto3 makes in the block limits and the keys of ``NOETL_MINIO_*``.

    ``S3ComputeLogManager`` takes neither, and makes its client from boto3's default session.
    """
    core = get_session()
    core.set_default_client_config(
        Config(connect_timeout=CONNECT_SECONDS, read_timeout=SEND_SECONDS, retries={"total_max_attempts": ATTEMPTS})
    )
    keys: dict[str, str | None] = {}
    if settings is not None:
        keys = {
            "aws_access_key_id": settings.minio_access_key,
            "aws_secret_access_key": settings.minio_secret_key.get_secret_value(),
            "aws_session_token": settings.minio_session_token.get_secret_value() or None,
            "region_name": settings.minio_region,
        }
    before = boto3.DEFAULT_SESSION
    boto3.setup_default_session(botocore_session=core, **keys)
    try:
        yield
    finally:
        boto3.DEFAULT_SESSION = before
