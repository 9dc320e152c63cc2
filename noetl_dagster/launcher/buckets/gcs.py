"""Compute logs in Google Cloud Storage, by the client of the ``gcs`` tier.

``dagster-gcp`` has a manager that does so, and brings BigQuery, Dataproc and more with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from noetl_dagster.dagster_internals import (
    CapturedLogSubscription,
    CloudStorageComputeLogManager,
    ComputeIOType,
    PollingComputeLogSubscriptionManager,
)
from noetl_dagster.launcher.compute_logs import EXTENSIONS, RunLogs
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.gcs import shared_client

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30
SEND_SECONDS = 120
AWAY_SECONDS = 5.0
"""How long a bucket that does not answer is asked again; who looks at a page waits for it."""

KeyOf = Callable[[Sequence[str], ComputeIOType, bool], str]
"""The object of a log key, of one side, whole or so far."""


class GcsLogs(CloudStorageComputeLogManager[Any]):
    """What is in the bucket; captures are another's.

    Args:
        local: where what was read is kept.
        settings: with bucket and endpoint.
        key_of: names objects.
    """

    def __init__(self, local: RunLogs, settings: Settings, key_of: KeyOf) -> None:
        self._local = local
        self._key_of = key_of
        self._bucket = shared_client(settings.gcs_endpoint).bucket(settings.gcs_bucket)
        self._subscriptions = PollingComputeLogSubscriptionManager(self)

    @property
    def local_manager(self) -> RunLogs:
        return self._local

    @property
    def upload_interval(self) -> int | None:
        return None

    def put(self, key: str, data: bytes) -> None:
        """Sends all at once: a file of the client that failed is sent again when it is collected, minutes long."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        retry = DEFAULT_RETRY.with_timeout(ANSWER_SECONDS)
        blob = self._bucket.blob(key)
        blob.upload_from_string(data, content_type="text/plain", timeout=SEND_SECONDS, retry=retry)

    def upload_to_cloud_storage(
        self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False
    ) -> None:
        path = self._local.get_captured_local_path(log_key, EXTENSIONS[io_type])
        self.put(self._key_of(log_key, io_type, partial), Path(path).read_bytes())

    def cloud_storage_has_logs(
        self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False
    ) -> bool:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.retry import DEFAULT_RETRY

        retry = DEFAULT_RETRY.with_timeout(AWAY_SECONDS)
        try:
            blob = self._bucket.blob(self._key_of(log_key, io_type, partial))
            return bool(blob.exists(timeout=ANSWER_SECONDS, retry=retry))
        except (GoogleAPIError, GoogleAuthError, OSError) as error:
            logger.warning("the bucket of compute logs cannot be asked: %s", error)
            return False

    def download_from_cloud_storage(
        self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False
    ) -> None:
        path = Path(self._local.get_captured_local_path(log_key, EXTENSIONS[io_type], partial=partial))
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = self._bucket.blob(self._key_of(log_key, io_type, partial))
        blob.download_to_filename(str(path), timeout=SEND_SECONDS)

    def display_path_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str:
        return f"gs://{self._bucket.name}/{self._key_of(log_key, io_type, False)}"

    def download_url_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str | None:
        """None: workload identity has no key to sign an address with; the webserver hands files out."""
        return None

    def get_log_keys_for_log_key_prefix(
        self, log_key_prefix: Sequence[str], io_type: ComputeIOType
    ) -> Sequence[list[str]]:
        ending = f".{EXTENSIONS[io_type]}"
        names = (name.rpartition("/")[2] for name in self._names(log_key_prefix))
        return [[*log_key_prefix, name.removesuffix(ending)] for name in names if name.endswith(ending)]

    def delete_logs(self, log_key: Sequence[str] | None = None, prefix: Sequence[str] | None = None) -> None:
        if log_key:
            sides = [(side, partial) for side in EXTENSIONS for partial in (False, True)]
            names = [self._key_of(log_key, side, partial) for side, partial in sides]
        else:
            names = self._names(prefix or ())
        for name in names:
            blob = self._bucket.blob(name)
            if blob.exists(timeout=ANSWER_SECONDS):
                blob.delete(timeout=ANSWER_SECONDS)

    def _names(self, prefix: Sequence[str]) -> list[str]:
        """Names of the objects below a prefix of log keys."""
        folder = self._key_of([*prefix, ""], ComputeIOType.STDOUT, False).rpartition("/")[0]
        return [blob.name for blob in self._bucket.list_blobs(prefix=f"{folder}/", timeout=ANSWER_SECONDS)]

    def on_subscribe(self, subscription: CapturedLogSubscription) -> None:
        self._subscriptions.add_subscription(subscription)

    def on_unsubscribe(self, subscription: CapturedLogSubscription) -> None:
        self._subscriptions.remove_subscription(subscription)

    def dispose(self) -> None:
        self._subscriptions.dispose()
