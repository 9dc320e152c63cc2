"""Compute logs in the object store too, so that every machine can read what a step printed.

They lie where dagster-aws's ``S3ComputeLogManager`` looks for them, and it is what reads them; in GCS ``GcsLogs`` does.
Runs write them with the result store's own client, which is loaded anyway: boto3 takes as long to load as a small run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from dagster import Field, Noneable, StringSource

from noetl_dagster.dagster_internals import (
    CapturedLogContext,
    CapturedLogMetadata,
    CapturedLogSubscription,
    CloudStorageComputeLogManager,
    ComputeIOType,
    ConfigurableClass,
    ConfigurableClassData,
)
from noetl_dagster.errors import StorageError
from noetl_dagster.launcher.compute_logs import EXTENSIONS, RunLogs
from noetl_dagster.launcher.uploads import Uploads
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings, StoreTier, settings_with
from noetl_dagster.tools.access import aws

logger = logging.getLogger(__name__)

PREFIX = "compute-logs"
TIERS = (StoreTier.MINIO, StoreTier.S3, StoreTier.GCS)

MOST_VARIABLE = "DAGSTER_TRUNCATE_COMPUTE_LOGS_UPLOAD_BYTES"
"""Dagster's own variable: bytes of a file that go up at most; 0: all."""

MOST_BYTES = 50 * 1024**2
WHOLE = 8 * 1024**2
"""Files up to this size go up in one request."""


class StoredRunLogs(CloudStorageComputeLogManager[Any], ConfigurableClass):
    """``RunLogs``, whose files go up when a capture has ended, beside the run.

    The files stay: on this machine they are what is read, there and then. Elsewhere it is the store.

    Args:
        base_dir: folder of the files.
        bucket: None: the tier's.
        prefix: folder in the bucket.
        tier: ``minio``, with ``NOETL_MINIO_*``, ``s3``, with the AWS environment, or ``gcs``, with Google's.
        endpoint_url: of the minio tier; None: ``NOETL_MINIO_ENDPOINT``.
        upload_interval: seconds after which what a run has printed so far goes up, again and again.
    """

    def __init__(
        self,
        base_dir: str,
        bucket: str | None = None,
        prefix: str = PREFIX,
        tier: str = StoreTier.MINIO,
        endpoint_url: str | None = None,
        upload_interval: int | None = None,
        inst_data: ConfigurableClassData | None = None,
    ) -> None:
        if tier not in TIERS:
            raise StorageError(f"compute_logs: tier is {tier!r}; use one of {', '.join(TIERS)}")
        self._folder = base_dir
        self._tier = StoreTier(tier)
        self._prefix = prefix.strip("/")
        self._inst_data = inst_data
        self._upload_interval = upload_interval
        self._local = RunLogs(base_dir)
        self._uploads = Uploads(self._send)
        self._settings = _settings(self._tier, bucket, endpoint_url)

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {
            "base_dir": StringSource,
            "bucket": Field(StringSource, is_required=False),
            "prefix": Field(StringSource, is_required=False, default_value=PREFIX),
            "tier": Field(StringSource, is_required=False, default_value=StoreTier.MINIO.value),
            "endpoint_url": Field(StringSource, is_required=False),
            "upload_interval": Field(Noneable(int), is_required=False, default_value=None),
        }

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> StoredRunLogs:
        return cls(inst_data=inst_data, **config_value)

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @property
    def local_manager(self) -> RunLogs:
        return self._local

    @property
    def upload_interval(self) -> int | None:
        return self._upload_interval

    # -- writing -------------------------------------------------------------------------------------

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Generator[CapturedLogContext]:
        try:
            with self._sent_now_and_then(log_key), self._local.capture_logs(log_key) as context:
                yield context
        finally:  # a run that was interrupted has printed something too
            self._uploads.add(log_key)

    def _on_capture_complete(self, log_key: Sequence[str]) -> None:
        self._uploads.add(log_key)

    @contextmanager
    def _sent_now_and_then(self, log_key: Sequence[str]) -> Iterator[None]:
        """What there is so far goes up every ``upload_interval`` seconds."""
        interval = self._upload_interval
        if not interval:
            yield
            return
        ended = threading.Event()

        def send() -> None:
            while not ended.wait(interval):
                try:
                    self._send(log_key, partial=True)
                except Exception as error:
                    logger.info("compute logs %s are not in the store yet: %r", "/".join(log_key), error)

        thread = threading.Thread(target=send, name="compute-logs-so-far", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _send(self, log_key: Sequence[str], partial: bool = False) -> None:
        # standard error last: where it is, the capture is complete
        for io_type in (ComputeIOType.STDOUT, ComputeIOType.STDERR):
            self.upload_to_cloud_storage(log_key, io_type, partial)

    def upload_to_cloud_storage(
        self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False
    ) -> None:
        """Sends one file, up to the size that ``DAGSTER_TRUNCATE_COMPUTE_LOGS_UPLOAD_BYTES`` allows."""
        path = Path(self._local.get_captured_local_path(log_key, EXTENSIONS[io_type]))
        if not path.exists():  # sensors and schedules write one of the two
            return
        key = self._key(log_key, io_type, partial)
        try:
            self._put(key, path)
        except FileNotFoundError as error:
            if self._tier is not StoreTier.MINIO or "NoSuchBucket" not in str(error):
                raise
            from noetl_dagster.storage.tiers import open_tier

            run_sync(open_tier(self._tier, self._settings, None).ready())
            self._put(key, path)

    def _put(self, key: str, path: Path) -> None:
        size, most = path.stat().st_size, int(os.environ.get(MOST_VARIABLE, MOST_BYTES))
        with path.open("rb") as file:
            self._write(key, _pieces(file, min(size, most) if most else size), size)

    def _write(self, key: str, pieces: Iterator[bytes], size: int) -> None:
        if self._tier is StoreTier.GCS:
            self._stored.put(key, b"".join(pieces))
            return
        import obstore

        from noetl_dagster.storage.tiers.objects import minio_store, s3_store

        store = (minio_store if self._tier is StoreTier.MINIO else s3_store)(self._settings)
        data = b"".join(pieces) if size <= WHOLE else pieces
        obstore.put(store, key, data, attributes={"Content-Type": "text/plain"}, chunk_size=WHOLE)

    def _key(self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool) -> str:
        """As ``S3ComputeLogManager`` names it."""
        *folders, name = log_key
        file = f"{name}.{EXTENSIONS[io_type]}{'.partial' if partial else ''}"
        return "/".join(part for part in (self._prefix, "storage", *folders, file) if part)

    def dispose(self) -> None:
        self._uploads.wait()
        self._local.dispose()
        if "_stored" in self.__dict__:
            self._stored.dispose()

    # -- reading -------------------------------------------------------------------------------------

    @cached_property
    def _stored(self) -> Any:
        """What reads the store: ``S3ComputeLogManager``, or ``GcsLogs``."""
        settings, s3 = self._settings, {}
        if self._tier is StoreTier.GCS:
            from noetl_dagster.launcher.buckets.gcs import GcsLogs

            return GcsLogs(self._local, settings, self._key)
        if self._tier is StoreTier.MINIO:
            s3 = {
                "endpoint_url": settings.minio_endpoint,
                "region_name": settings.minio_region,
                "aws_access_key_id": settings.minio_access_key,
                "aws_secret_access_key": settings.minio_secret_key.get_secret_value(),
                "aws_session_token": settings.minio_session_token.get_secret_value() or None,
                "verify": None if settings.minio_verify else False,
            }
        return aws.compute_logs(self._folder, bucket=self._bucket, prefix=self._prefix, s3=s3)

    @property
    def _bucket(self) -> str:
        settings = self._settings
        buckets = {StoreTier.MINIO: settings.minio_bucket, StoreTier.S3: settings.s3_bucket}
        return buckets.get(self._tier, settings.gcs_bucket) or ""

    def is_capture_complete(self, log_key: Sequence[str]) -> bool:
        if self._local.is_capture_complete(log_key):
            return True
        if self.has_local_file(log_key, ComputeIOType.STDERR):  # it goes on, or its process was killed
            return False
        return self.cloud_storage_has_logs(log_key, ComputeIOType.STDERR)

    def cloud_storage_has_logs(
        self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False
    ) -> bool:
        from botocore.exceptions import BotoCoreError

        try:
            return bool(self._stored.cloud_storage_has_logs(log_key, io_type, partial=partial))
        except BotoCoreError as error:
            logger.warning("the store of compute logs cannot be asked: %s", error)
            return False

    def download_from_cloud_storage(
        self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False
    ) -> None:
        self._stored.download_from_cloud_storage(log_key, io_type, partial=partial)
        if io_type is ComputeIOType.STDERR and not partial:
            Path(self._local.get_captured_local_path(log_key, "complete")).touch()

    def get_log_metadata(self, log_key: Sequence[str]) -> CapturedLogMetadata:
        """The webserver hands files out wherever they are: a browser need not reach the store."""
        here = self._local.get_log_metadata(log_key)
        if self.has_local_file(log_key, ComputeIOType.STDERR):
            return here
        return CapturedLogMetadata(
            stdout_location=self.display_path_for_type(log_key, ComputeIOType.STDOUT),
            stderr_location=self.display_path_for_type(log_key, ComputeIOType.STDERR),
            stdout_download_url=here.stdout_download_url,
            stderr_download_url=here.stderr_download_url,
        )

    def display_path_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str:
        scheme = "gs" if self._tier is StoreTier.GCS else "s3"
        return f"{scheme}://{self._bucket}/{self._key(log_key, io_type, partial=False)}"

    def download_url_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str | None:
        url: str | None = self._stored.download_url_for_type(log_key, io_type)
        return url

    def get_log_keys_for_log_key_prefix(
        self, log_key_prefix: Sequence[str], io_type: ComputeIOType
    ) -> Sequence[list[str]]:
        stored = self._stored.get_log_keys_for_log_key_prefix(log_key_prefix, io_type)
        try:
            here = self._local.get_log_keys_for_log_key_prefix(log_key_prefix, io_type)
        except FileNotFoundError:
            here = []
        return [list(key) for key in sorted({tuple(key) for key in (*stored, *here)})]

    def delete_logs(self, log_key: Sequence[str] | None = None, prefix: Sequence[str] | None = None) -> None:
        self._uploads.wait()  # else they would come back
        self._local.delete_logs(log_key=log_key, prefix=prefix)
        self._stored.delete_logs(log_key=log_key, prefix=prefix)

    def on_subscribe(self, subscription: CapturedLogSubscription) -> None:
        if self.has_local_file(subscription.log_key, ComputeIOType.STDERR):
            self._local.follow(subscription)
        else:
            self._stored.on_subscribe(subscription)

    def on_unsubscribe(self, subscription: CapturedLogSubscription) -> None:
        self._local.leave(subscription)
        if "_stored" in self.__dict__:
            self._stored.on_unsubscribe(subscription)


def _settings(tier: StoreTier, bucket: str | None, endpoint: str | None) -> Settings:
    """The settings with what ``dagster.yaml`` says of the store."""
    if tier is StoreTier.MINIO:
        return settings_with(minio_bucket=bucket, minio_endpoint=endpoint)
    if tier is StoreTier.GCS:
        return settings_with(gcs_bucket=bucket)
    return settings_with(s3_bucket=bucket)


def _pieces(file: Any, size: int) -> Iterator[bytes]:
    """The first bytes of a file that may grow meanwhile."""
    while size > 0 and (piece := file.read(min(size, 1 << 20))):
        size -= len(piece)
        yield piece
