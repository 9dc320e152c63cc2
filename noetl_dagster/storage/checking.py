"""Checks references against the bytes in the stores, and the objects of the stores against references."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from noetl_dagster.errors import StorageError
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.events.rules import Rule
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage.catalog import RefCatalog
from noetl_dagster.storage.codec import RunningDigest
from noetl_dagster.storage.placement import KEY_ROOT, Placement, canonical, fallbacks_other_than, folder_of, owner_of

LOOKS_IN_FLIGHT = 32
READS_IN_FLIGHT = 8
"""Objects that are read at the same time, a chunk of each in memory."""

MISSING = Rule(
    "object.missing",
    "the bytes of a result are missing",
    "restore the object, for example from a version of the bucket; or forget it with 'noetl-dagster verify "
    "EXECUTION_ID --forget-missing' and resume the execution; or run the execution again",
)
DAMAGED = Rule(
    "object.damaged",
    "the bytes of a result differ from those that were stored",
    "as for object.missing, after you have deleted the damaged object",
)
ORPHAN = Rule(
    "object.orphan",
    "an object of an execution that has ended is named by no reference and by no event",
    "'noetl-dagster verify --repair' and 'noetl-dagster maintain' delete it",
)
STORES = (MISSING, DAMAGED, ORPHAN)


class Damage(NamedTuple):
    """A reference whose bytes are missing or wrong."""

    ref: ResultRef
    rule: Rule


@dataclass(slots=True)
class ObjectCheck:
    """Checks objects. It does not read them if it is ``quick``.

    Attributes:
        shared: the stores have objects of other logs.
        references: how many were checked.
        bytes: how many bytes were read.
        unchecked: why stores could not be checked, by name.
        skipped: references to stores that this process does not have, by tier.
    """

    placement: Placement
    catalog: RefCatalog
    shared: bool
    quick: bool = False
    references: int = 0
    bytes: int = 0
    unchecked: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    async def damaged(self, execution_id: int | None = None) -> AsyncIterator[Damage]:
        """Yields the references, of one execution or of all, whose bytes are missing or differ."""
        limit = asyncio.Semaphore(LOOKS_IN_FLIGHT if self.quick else READS_IN_FLIGHT)
        present = {*self.placement.lasting(), StoreTier.EVENTLOG}

        async def check(ref: ResultRef) -> Rule | None:
            async with limit:
                return await self._checked(ref)

        async for page in self.catalog.stored(execution_id, datetime.now(UTC)):
            refs = [ref for ref in page if canonical(ref.store_tier) in present]
            self.skipped.update(ref.store_tier.value for ref in page if canonical(ref.store_tier) not in present)
            for ref, rule in zip(refs, await asyncio.gather(*map(check, refs)), strict=True):
                # it may have been deleted meanwhile: bytes go before rows
                if rule is not None and await self.catalog.is_recorded(ref):
                    yield Damage(ref, rule)

    async def _checked(self, ref: ResultRef) -> Rule | None:
        tier = canonical(ref.store_tier)
        if tier.value in self.unchecked:
            return None
        try:
            rule = await (self._check_folder(ref) if ref.physical_uri.endswith("/") else self._check_object(ref))
        except KeyError:
            rule = MISSING
        except StorageError as error:  # the store does not answer, or is not the one of the reference
            self.unchecked[tier.value] = str(error)
            return None
        self.references += 1
        return rule

    async def _check_object(self, ref: ResultRef) -> Rule | None:
        tier, digest, size = self.placement.tier(ref.store_tier), RunningDigest(), 0
        if self.quick or ref.sha256 is None:
            size = await tier.size(ref.physical_uri)
            return DAMAGED if size != ref.bytes_size else None
        async for chunk in tier.stream(ref.physical_uri):
            size += len(chunk)
            await digest.add(chunk)
        self.bytes += size
        return DAMAGED if size != ref.bytes_size or await digest.hexdigest() != ref.sha256 else None

    async def _check_folder(self, ref: ResultRef) -> Rule | None:
        """Looks for the files of a dataset. That of another program, outside of the results, is not checked."""
        tier, uri = self.placement.tier(ref.store_tier), ref.physical_uri
        root = tier.uri(KEY_ROOT)
        if not uri.startswith(root) or not ref.bytes_size:
            return None
        files = ref.extra.get("files")
        if not files:
            async for keys in tier.keys(KEY_ROOT + uri.removeprefix(root)):
                if keys:
                    return None
            return MISSING
        size = sum([await tier.size(uri + file) for file in files])
        return DAMAGED if size != ref.bytes_size else None

    async def orphans(self, before: datetime, execution_id: int | None = None) -> AsyncIterator[str]:
        """Yields the addresses of objects without a reference, in all stores; see :meth:`orphans_in`."""
        for name in self.placement.lasting():
            if name.value in self.unchecked:
                continue
            try:
                async for uri in self.orphans_in(name, before, execution_id):
                    yield uri
            except StorageError as error:
                self.unchecked[name.value] = str(error)

    async def orphans_in(
        self, name: StoreTier, before: datetime, execution_id: int | None = None
    ) -> AsyncIterator[str]:
        """Yields the addresses of a store's objects that are older than a moment and that no reference names.

        Only objects of ended executions count. If the store is not ``shared`` with other logs, so do those of
        executions that the log does not contain. Raises ``TierUnavailableError``.
        """
        tier, newest = self.placement.tier(name), snowflake_floor(before)
        unknown = not self.shared or name is StoreTier.DB
        elsewhere = sorted(fallbacks_other_than(name))
        async for keys in tier.keys(folder_of(execution_id)):
            owners = {key: owner for key in keys if (owner := owner_of(key)) and owner[1] < newest}
            if not owners:
                continue
            unnamed = await self.catalog.unrecorded(list(owners.values()), unknown=unknown, elsewhere=elsewhere)
            for key, (_, ref_id) in owners.items():
                if ref_id in unnamed:
                    yield tier.uri(key)
