"""Chooses the tier of a result, and another one while that store is unavailable."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import asyncpg

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers import open_tier
from noetl_dagster.storage.tiers.base import Bytes, Tier, TierTooSmallError, TierUnavailableError

log = logging.getLogger(__name__)

FALLBACKS: dict[StoreTier, tuple[StoreTier, ...]] = {
    StoreTier.MINIO: (StoreTier.KV, StoreTier.DISK),
    StoreTier.KV: (StoreTier.DISK,),
    StoreTier.MEMORY: (StoreTier.DISK,),
}
"""Tiers to try in order while a store is unavailable (``object`` is today's ``disk``)."""

KEY_ROOT = "exec/"
_KEY = re.compile(KEY_ROOT + r"(?P<execution>\d+)/[^/]+/[^/]*-(?P<ref>\d+)(?:[./].*)?$")

REST_SECONDS = 5.0
"""Seconds for which a store that did not answer is skipped."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The location of stored bytes; ``instead_of`` is the chosen tier if it was unavailable."""

    tier: StoreTier
    uri: str
    instead_of: StoreTier | None = None


def canonical(tier: StoreTier) -> StoreTier:
    """Returns ``disk`` for its older name ``object``, which rows and playbooks still use."""
    return StoreTier.DISK if tier is StoreTier.OBJECT else tier


class Placement:
    """Opens tiers on first use and moves bytes into the right one."""

    def __init__(self, settings: Settings, pool: asyncpg.Pool | None) -> None:
        self._settings = settings
        self._pool = pool
        self._tiers: dict[StoreTier, Tier] = {}
        self._resting_until: dict[StoreTier, float] = {}

    def tier(self, tier: StoreTier) -> Tier:
        """Returns the tier of this name, opened on first use."""
        tier = canonical(tier)
        if tier not in self._tiers:
            self._tiers[tier] = open_tier(tier, self._settings, self._pool)
        return self._tiers[tier]

    def lasting(self) -> list[StoreTier]:
        """Returns the configured tiers whose objects outlive this process."""
        settings = self._settings
        present = {
            StoreTier.MINIO: settings.minio_endpoint is not None,
            StoreTier.S3: settings.s3_bucket is not None,
            StoreTier.GCS: settings.gcs_bucket is not None,
            StoreTier.PVC: settings.pvc_mount_path is not None,
            StoreTier.KV: settings.nats_url is not None,
            StoreTier.DB: self._pool is not None,
            StoreTier.DISK: (settings.home / "results").is_dir(),
            StoreTier.DUCKDB: (settings.home / "results.duckdb").is_file(),
        }
        return [tier for tier, there in present.items() if there]

    def choose(self, size: int | None, wanted: StoreTier | None) -> StoreTier:
        """Returns the tier of a result of ``size`` bytes; None is a stream of unknown length and counts as large."""
        if wanted is not None:
            return canonical(wanted)
        large = size is None or size > self._settings.pvc_tier_threshold_bytes
        if large and self._settings.pvc_mount_path is not None:
            return StoreTier.PVC
        return canonical(self._settings.default_store_tier)

    async def put(self, tier: StoreTier, key: str, data: Bytes) -> Placed:
        """Stores bytes in ``tier``, or in its next fallback if that store is unavailable.

        Raises:
            StorageError: no tier accepted them; names the reason of each.
        """
        failures: list[str] = []
        for candidate in self._candidates(tier):
            try:
                uri = await self.tier(candidate).put(key, data)
            except TierUnavailableError as error:
                self._note_failure(candidate, error)
                failures.append(str(error))
            else:
                self._resting_until.pop(candidate, None)
                return self._placed(tier, candidate, uri)
        raise TierUnavailableError("; ".join(failures))

    async def put_stream(self, tier: StoreTier, key: str, chunks: AsyncIterator[Bytes]) -> Placed:
        """Stores a stream as :meth:`put` does, once the store answers: a stream cannot be repeated for a fallback."""
        failures: list[str] = []
        for candidate in self._candidates(tier):
            if candidate is StoreTier.KV and tier is not StoreTier.KV:
                continue  # a stream is larger than any KV value
            try:
                await self.tier(candidate).ready()
            except TierUnavailableError as error:
                self._note_failure(candidate, error)
                failures.append(str(error))
                continue
            self._resting_until.pop(candidate, None)
            source = _MonitoredStream(chunks)
            try:
                uri = await self.tier(candidate).put_stream(key, source.chunks())
            except Exception:
                if source.error is not None:
                    raise source.error from None  # not the store's error
                raise
            return self._placed(tier, candidate, uri)
        raise TierUnavailableError("; ".join(failures))

    def _candidates(self, tier: StoreTier) -> list[StoreTier]:
        chain = [tier, *FALLBACKS.get(tier, ())]
        now = time.monotonic()
        awake = [candidate for candidate in chain if self._resting_until.get(candidate, 0.0) <= now]
        return awake or chain

    def _note_failure(self, tier: StoreTier, error: TierUnavailableError) -> None:
        if not isinstance(error, TierTooSmallError):
            self._resting_until[tier] = time.monotonic() + REST_SECONDS
            log.warning("%s", error)

    @staticmethod
    def _placed(wanted: StoreTier, used: StoreTier, uri: str) -> Placed:
        return Placed(used, uri, None if used is wanted else wanted)

    async def close(self) -> None:
        """Closes the tiers that were opened."""
        for tier in self._tiers.values():
            await tier.close()
        self._tiers.clear()


class _MonitoredStream:
    """A stream that keeps its own error, to tell it from one of the store."""

    def __init__(self, chunks: AsyncIterator[Bytes]) -> None:
        self._chunks = chunks
        self.error: Exception | None = None

    async def chunks(self) -> AsyncIterator[Bytes]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except Exception as error:
            self.error = error
            raise


def key_of(execution_id: int, step: str, name: str, ref_id: int, extension: str) -> str:
    """Returns the key of an object: ``exec/<execution>/<step>/<name>-<ref id><extension>``.

    The ref id separates visits, attempts and iterations of one step: stored bytes are never overwritten.

    Raises:
        StorageError: a name is a path out of the store.
    """
    return f"{KEY_ROOT}{execution_id}/{_segment(step, 'step')}/{_segment(name, 'result')}-{ref_id}{extension}"


def owner_of(key: str) -> tuple[int, int] | None:
    """Returns execution and reference id of a key of :func:`key_of`, or of a file below it; None for others."""
    found = _KEY.match(key)
    return None if found is None else (int(found["execution"]), int(found["ref"]))


def _segment(text: str, what: str) -> str:
    if ".." in text.replace("\\", "/").split("/") or text.startswith("/"):
        raise StorageError(f"the {what} name {text!r} is a path out of the store; use a plain name")
    clean = "".join(
        character if character.isascii() and (character.isalnum() or character in "-_.") else "_"
        for character in text
    )
    return clean.lstrip(".") or "_"
