"""Chooses the tier of a result, and another one while that store is unavailable."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import asyncpg

from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers import configured, open_tier
from noetl_dagster.storage.tiers.base import Bytes, Tier, TierTooSmallError, TierUnavailableError

T = TypeVar("T")
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
        home = self._settings.home
        present = {
            StoreTier.KV: self._settings.nats_url is not None,
            StoreTier.DB: self._pool is not None,
            StoreTier.DISK: (home / "results").is_dir(),
            StoreTier.DUCKDB: (home / "results.duckdb").is_file(),
        }
        return [*configured(self._settings), *(tier for tier, there in present.items() if there)]

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

        Raises ``StorageError`` with the reason of each if no tier accepted them.
        """
        used, uri = await self._first(self._candidates(tier), lambda one: one.put(key, data))
        return Placed(used, uri, None if used is tier else tier)

    async def put_stream(self, tier: StoreTier, key: str, chunks: AsyncIterator[Bytes]) -> Placed:
        """Stores a stream as :meth:`put` does, once the store answers: a stream cannot be repeated for a fallback."""
        own_errors: list[Exception] = []

        async def monitored() -> AsyncIterator[Bytes]:
            try:
                async for chunk in chunks:
                    yield chunk
            except Exception as error:
                own_errors.append(error)
                raise

        # a stream is larger than any KV value
        candidates = [one for one in self._candidates(tier) if one is not StoreTier.KV or tier is StoreTier.KV]
        used, _ = await self._first(candidates, lambda one: one.ready())
        try:
            uri = await self.tier(used).put_stream(key, monitored())
        except Exception:
            if own_errors:  # not the store's error
                raise own_errors[0] from None
            raise
        return Placed(used, uri, None if used is tier else tier)

    def _candidates(self, tier: StoreTier) -> list[StoreTier]:
        chain = [tier, *FALLBACKS.get(tier, ())]
        now = time.monotonic()
        awake = [candidate for candidate in chain if self._resting_until.get(candidate, 0.0) <= now]
        return awake or chain

    async def _first(self, candidates: list[StoreTier], action: Callable[[Tier], Awaitable[T]]) -> tuple[StoreTier, T]:
        """Returns the first of the tiers that is available for an action, and the action's result."""
        failures: list[str] = []
        for candidate in candidates:
            try:
                result = await action(self.tier(candidate))
            except TierUnavailableError as error:
                if not isinstance(error, TierTooSmallError):
                    self._resting_until[candidate] = time.monotonic() + REST_SECONDS
                    log.warning("%s", error)
                failures.append(str(error))
            else:
                self._resting_until.pop(candidate, None)
                return candidate, result
        raise TierUnavailableError("; ".join(failures))

    async def close(self) -> None:
        """Closes the tiers that were opened."""
        for tier in self._tiers.values():
            await tier.close()
        self._tiers.clear()


def fallbacks_other_than(tier: StoreTier) -> set[StoreTier]:
    """Returns the tiers that may hold a result instead of this one, by all of their names; no two share a store."""
    return {one for one in (StoreTier.KV, StoreTier.DISK, StoreTier.OBJECT) if canonical(one) is not canonical(tier)}


def key_of(execution_id: int, step: str, name: str, ref_id: int, extension: str) -> str:
    """Returns the key of an object: ``exec/<execution>/<step>/<name>-<ref id><extension>``.

    The ref id separates visits, attempts and iterations of one step: stored bytes are never overwritten. Names become
    plain, so none leads out of the store.
    """
    return f"{KEY_ROOT}{execution_id}/{_plain(step)}/{_plain(name)}-{ref_id}{extension}"


def folder_of(execution_id: int | None) -> str:
    """Returns the beginning of the keys of an execution's objects; without an execution, of all results."""
    return KEY_ROOT if execution_id is None else f"{KEY_ROOT}{execution_id}/"


def owner_of(key: str) -> tuple[int, int] | None:
    """Returns execution and reference id of a key of :func:`key_of`, or of a file below it; None for others."""
    match = _KEY.match(key)
    return None if match is None else (int(match["execution"]), int(match["ref"]))


def _plain(text: str) -> str:
    clean = "".join(
        character if character.isascii() and (character.isalnum() or character in "-_.") else "_" for character in text
    )
    return clean.lstrip(".") or "_"
