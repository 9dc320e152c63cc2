"""Compute logs in the object store too, so that every machine can read the output of a step.

Objects have the names that dagster-aws's ``S3ComputeLogManager`` gives them, so it can read them as well. This module
doesn't build on it: boto3 takes as long to load as a small run, it can't read Google Cloud Storage, and runs have the
result store's own client loaded anyway.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster import Field, Noneable, StringSource

# private: compute logs in the object store
from dagster._core.storage.cloud_storage_compute_log_manager import (
    CloudStorageComputeLogManager,
    PollingComputeLogSubscriptionManager,
)

# private: the interface of compute log managers
from dagster._core.storage.compute_log_manager import CapturedLogContext, CapturedLogSubscription, ComputeIOType

# private: a section of dagster.yaml
from dagster._serdes import ConfigurableClass

from noetl_dagster import embedded
from noetl_dagster.errors import StorageError
from noetl_dagster.launcher.compute_logs import EXTENSIONS, RunLogs
from noetl_dagster.private_files import private_file, private_folder
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import StoreTier, get_settings, settings_with

if TYPE_CHECKING:
    from noetl_dagster.storage.tiers.gcs import GcsBucket
    from noetl_dagster.storage.tiers.objects import S3Bucket

logger = logging.getLogger(__name__)

PREFIX = "compute-logs"
BUCKETS = {StoreTier.MINIO: "minio_bucket", StoreTier.S3: "s3_bucket", StoreTier.GCS: "gcs_bucket"}
"""The setting of each tier's bucket."""

MOST_VARIABLE = "DAGSTER_TRUNCATE_COMPUTE_LOGS_UPLOAD_BYTES"
"""Dagster's own variable: bytes of a file that are uploaded at most; 0: all."""

MOST_BYTES = 50 * 1024**2

SEND_SECONDS = 30.0
"""Seconds for which an upload is repeated while Google does not answer."""

LOOK_SECONDS = 5.0
"""Seconds for which a look-up is repeated while Google does not answer; a page of the UI waits for it."""


class StoredRunLogs(CloudStorageComputeLogManager[Any], ConfigurableClass):
    """``RunLogs`` whose files are uploaded when a capture has ended, without delaying the run.

    The files stay. On their machine they are read directly; other machines read the store.

    Args:
        base_dir: folder of the files.
        bucket: None: the tier's.
        prefix: folder in the bucket.
        tier: ``minio``, with ``NOETL_MINIO_*``, ``s3``, with the AWS environment, or ``gcs``, with Google's.
        endpoint_url: of the minio tier; None: ``NOETL_MINIO_ENDPOINT``.
        home: state folder of an embedded object store, which has its secret key if ``NOETL_MINIO_SECRET_KEY`` is unset.
        upload_interval: seconds between uploads of the output so far, while the run prints.
    """

    def __init__(
        self,
        base_dir: str,
        bucket: str | None = None,
        prefix: str = PREFIX,
        tier: str = StoreTier.MINIO,
        endpoint_url: str | None = None,
        home: str | None = None,
        upload_interval: int | None = None,
        inst_data: Any = None,
    ) -> None:
        if tier not in BUCKETS:
            raise StorageError(f"compute_logs: tier is {tier!r}; use one of {', '.join(BUCKETS)}")
        self._tier = StoreTier(tier)
        self._prefix = prefix.strip("/")
        self._inst_data = inst_data
        self._upload_interval = upload_interval
        self._local = RunLogs(base_dir)
        # one upload after another; the process does not end before everything was uploaded or has failed
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="compute-logs-up")
        self._last_upload: Future[None] | None = None
        self._subscriptions = PollingComputeLogSubscriptionManager(self)
        given: dict[str, object] = {BUCKETS[self._tier]: bucket}
        if self._tier is StoreTier.MINIO:
            given["minio_endpoint"] = endpoint_url
            if home and endpoint_url and not get_settings().minio_secret_key.get_secret_value():
                given["minio_secret_key"] = embedded.object_store_key(Path(home), endpoint_url)
        self._settings = settings_with(**given)
        self._bucket_name: str = getattr(self._settings, BUCKETS[self._tier]) or ""

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        """Returns the fields of ``compute_logs.config`` in ``dagster.yaml``."""
        return {
            "base_dir": StringSource,
            "bucket": Field(StringSource, is_required=False),
            "prefix": Field(StringSource, is_required=False, default_value=PREFIX),
            "tier": Field(StringSource, is_required=False, default_value=StoreTier.MINIO.value),
            "endpoint_url": Field(StringSource, is_required=False),
            "home": Field(StringSource, is_required=False),
            "upload_interval": Field(Noneable(int), is_required=False, default_value=None),
        }

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Mapping[str, Any]) -> StoredRunLogs:
        """Makes the manager from its configuration."""
        return cls(inst_data=inst_data, **config_value)

    @property
    def inst_data(self) -> Any:
        """Returns the configuration that Dagster made this object from."""
        return self._inst_data

    @property
    def local_manager(self) -> RunLogs:
        """Returns the manager of the files on this machine."""
        return self._local

    @property
    def upload_interval(self) -> int | None:
        """Returns the seconds between uploads of the output so far; None: only when a capture has ended."""
        return self._upload_interval

    # -- writing -------------------------------------------------------------------------------------

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Generator[CapturedLogContext]:
        """Captures standard output and error until the block ends, then hands the files to the upload thread."""
        try:
            with self._uploaded_at_intervals(log_key), self._local.capture_logs(log_key) as context:
                yield context
        finally:  # an interrupted run has printed something too
            self._on_capture_complete(log_key)

    def _on_capture_complete(self, log_key: Sequence[str]) -> None:
        def upload() -> None:
            try:
                self._send(log_key)
            except Exception as error:
                logger.warning(
                    "compute logs %s are on this machine only: %s: %s",
                    "/".join(log_key),
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )

        self._last_upload = self._uploads.submit(upload)

    def _wait_for_uploads(self) -> None:
        if self._last_upload is not None:
            self._last_upload.result()

    @contextmanager
    def _uploaded_at_intervals(self, log_key: Sequence[str]) -> Iterator[None]:
        interval = self._upload_interval
        if not interval:
            yield
            return
        ended = threading.Event()

        def upload_so_far() -> None:
            while not ended.wait(interval):
                try:
                    self._send(log_key, partial=True)
                except Exception as error:
                    logger.info("compute logs %s are not in the store yet: %r", "/".join(log_key), error)

        threading.Thread(target=upload_so_far, name="compute-logs-so-far", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _send(self, log_key: Sequence[str], partial: bool = False) -> None:
        # standard error last: its presence marks the capture as complete
        for io_type in (ComputeIOType.STDOUT, ComputeIOType.STDERR):
            self.upload_to_cloud_storage(log_key, io_type, partial)

    def upload_to_cloud_storage(self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False) -> None:
        """Uploads one file, up to the size that ``DAGSTER_TRUNCATE_COMPUTE_LOGS_UPLOAD_BYTES`` allows."""
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
            self._bucket(SEND_SECONDS).write(key, file, min(size, most) if most else size, "text/plain")

    def _key(self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False) -> str:
        """Returns the name that ``S3ComputeLogManager`` gives the object."""
        *folders, name = log_key
        file = f"{name}.{EXTENSIONS[io_type]}{'.partial' if partial else ''}"
        return "/".join(part for part in (self._prefix, "storage", *folders, file) if part)

    def dispose(self) -> None:
        """Waits for the uploads and releases everything."""
        self._wait_for_uploads()
        self._local.dispose()
        self._subscriptions.dispose()

    # -- reading -------------------------------------------------------------------------------------

    @cached_property
    def _stored(self) -> S3Bucket | GcsBucket:
        return self._bucket(LOOK_SECONDS)

    def _bucket(self, patience: float) -> S3Bucket | GcsBucket:
        if self._tier is StoreTier.GCS:
            from noetl_dagster.storage.tiers.gcs import GcsBucket

            return GcsBucket(self._settings, self._bucket_name, patience=patience)
        from noetl_dagster.storage.tiers.objects import S3Bucket, minio_store, s3_store

        return S3Bucket((minio_store if self._tier is StoreTier.MINIO else s3_store)(self._settings))

    def is_capture_complete(self, log_key: Sequence[str]) -> bool:
        """Reports whether a capture has ended and its whole output can be read here."""
        if self._local.is_capture_complete(log_key):
            return True
        if self.has_local_file(log_key, ComputeIOType.STDERR):  # it still runs, or its process was killed
            return False
        return self.cloud_storage_has_logs(log_key, ComputeIOType.STDERR)

    def cloud_storage_has_logs(self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False) -> bool:
        """Reports whether the store has an object; False with a warning if it does not answer."""
        try:
            return self._stored.exists(self._key(log_key, io_type, partial))
        except Exception as error:  # each client has its own errors
            logger.warning("the store of compute logs does not answer: %s", str(error).partition("\n")[0])
            return False

    def download_from_cloud_storage(
        self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False
    ) -> None:
        """Copies an object to the file on this machine that Dagster then reads."""
        path = Path(self._local.get_captured_local_path(log_key, EXTENSIONS[io_type], partial=partial))
        private_folder(path.parent)
        contents = self._stored.read(self._key(log_key, io_type, partial))
        with open(path, "wb", opener=private_file) as file:
            file.write(contents)
        if io_type is ComputeIOType.STDERR and not partial:
            Path(self._local.get_captured_local_path(log_key, "complete")).touch(mode=0o600)

    def display_path_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str:
        """Returns the path of a file on this machine, else the URI of its object."""
        if self.has_local_file(log_key, ComputeIOType.STDERR):
            return str(self._local.get_captured_local_path(log_key, EXTENSIONS[io_type]))
        scheme = "gs" if self._tier is StoreTier.GCS else "s3"
        return f"{scheme}://{self._bucket_name}/{self._key(log_key, io_type)}"

    def download_url_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str:
        """Returns the URL under which the webserver serves a file, so browsers need no access to the store."""
        url: str = self._local.get_captured_log_download_url(log_key, io_type)  # type: ignore[no-untyped-call]
        return url

    def get_log_keys_for_log_key_prefix(
        self, log_key_prefix: Sequence[str], io_type: ComputeIOType
    ) -> Sequence[list[str]]:
        """Returns the log keys below a prefix, of this machine and of the store."""
        ending = f".{EXTENSIONS[io_type]}"
        names = (name.rpartition("/")[2] for name in self._names(log_key_prefix))
        stored = {(*log_key_prefix, name.removesuffix(ending)) for name in names if name.endswith(ending)}
        try:
            here = self._local.get_log_keys_for_log_key_prefix(log_key_prefix, io_type)
        except FileNotFoundError:
            here = []
        return [list(key) for key in sorted(stored | {tuple(key) for key in here})]

    def delete_logs(self, log_key: Sequence[str] | None = None, prefix: Sequence[str] | None = None) -> None:
        """Removes the logs of a key or below a prefix, here and in the store."""
        self._wait_for_uploads()  # otherwise a waiting upload would store them again
        self._local.delete_logs(log_key=log_key, prefix=prefix)
        if log_key:
            sides = [(side, partial) for side in EXTENSIONS for partial in (False, True)]
            self._stored.delete([self._key(log_key, side, partial) for side, partial in sides])
        else:
            self._stored.delete(self._names(prefix or ()))

    def _names(self, prefix: Sequence[str]) -> list[str]:
        """Returns the names of the objects below a prefix of log keys."""
        folder = self._key([*prefix, ""], ComputeIOType.STDOUT).rpartition("/")[0]
        return list(self._stored.sizes(f"{folder}/"))

    def on_subscribe(self, subscription: CapturedLogSubscription) -> None:
        """Starts to send output to a subscription: from the file on this machine, else from the store."""
        if self.has_local_file(subscription.log_key, ComputeIOType.STDERR):
            self._local.follow(subscription)
        else:
            self._subscriptions.add_subscription(subscription)

    def on_unsubscribe(self, subscription: CapturedLogSubscription) -> None:
        """Ends a subscription."""
        self._local.leave(subscription)
        self._subscriptions.remove_subscription(subscription)
