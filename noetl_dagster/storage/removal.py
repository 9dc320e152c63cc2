"""Removes results: single ones, expired ones, and bytes without a reference."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta

from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage.catalog import RefCatalog
from noetl_dagster.storage.placement import KEY_ROOT, Placement, owner_of
from noetl_dagster.storage.tiers.base import TakesUploads, TierUnavailableError

log = logging.getLogger(__name__)

ORPHAN_GRACE = timedelta(days=1)
"""Age from which bytes without a reference count as abandoned: no put lasts that long."""


class Removal:
    """Removes bytes before their rows, so that the next call finds and completes an interrupted removal."""

    def __init__(self, placement: Placement, catalog: RefCatalog) -> None:
        self._placement = placement
        self._catalog = catalog

    async def one(self, ref: ResultRef) -> None:
        """Removes one result."""
        await self._bytes_of(ref)
        await self._catalog.forget([ref.ref_id])

    async def expired(self, now: datetime) -> int:
        """Removes results that expired before a moment, a page at a time. Returns the number removed."""
        removed = 0
        while True:
            async with self._catalog.locked_expired(now) as (connection, refs):
                outcomes = await asyncio.gather(*map(self._bytes_of, refs), return_exceptions=True)
                gone = [ref.ref_id for ref, outcome in zip(refs, outcomes, strict=True) if outcome is None]
                await self._catalog.forget(gone, connection)
            removed += len(gone)
            if not gone:
                return removed

    async def orphans(self, now: datetime, grace: timedelta, *, shared: bool) -> int:
        """Removes objects without a reference and interrupted uploads, in every configured tier. Returns their number.

        The key of an object contains its execution and reference id, and thereby its time. Objects stay if they are
        younger than ``grace``, if their execution still runs, or, in stores that are ``shared`` by several
        databases, if this database does not contain their execution.
        """
        removed = 0
        for tier in self._placement.lasting():
            try:
                removed += await self._orphans_of(tier, now - grace, shared and tier is not StoreTier.DB)
                removed += await self._uploads_of(tier, now - grace)
            except TierUnavailableError as error:
                log.warning("%s", error)  # the next call sweeps it
        return removed

    async def _uploads_of(self, tier_name: StoreTier, before: datetime) -> int:
        tier = self._placement.tier(tier_name)
        aborted = await tier.abort_uploads(KEY_ROOT, before) if isinstance(tier, TakesUploads) else 0
        if aborted:
            log.info("%s tier: aborted %d interrupted uploads", tier_name.value, aborted)
        return aborted

    async def _orphans_of(self, tier_name: StoreTier, before: datetime, shared: bool) -> int:
        tier, removed = self._placement.tier(tier_name), 0
        newest = snowflake_floor(int(before.timestamp() * 1000))
        async for keys in tier.keys(KEY_ROOT):
            owners = {key: owner for key in keys if (owner := owner_of(key)) and owner[1] < newest}
            if not owners:
                continue
            unknown = await self._catalog.unrecorded(list(owners.values()), unknown=not shared)
            for key, (_, ref_id) in owners.items():
                if ref_id in unknown:
                    await tier.delete(tier.uri(key))
                    removed += 1
        if removed:
            log.info("%s tier: removed %d objects without a reference", tier_name.value, removed)
        return removed

    async def _bytes_of(self, ref: ResultRef) -> None:
        if ref.kind is not RefKind.MANIFEST:
            await self._placement.tier(ref.store_tier).delete(ref.physical_uri)
