"""Parts as Parquet or JSON lines in a folder or a bucket."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

import obstore
from obstore.store import LocalStore

from noetl_dagster.tools.access.credentials import CredentialType
from noetl_dagster.tools.access.objects import open_bucket
from noetl_dagster.tools.base import Toolbox
from noetl_dagster.tools.rows.batches import StoredRows, batches_of
from noetl_dagster.tools.rows.files import arrow_schema, row_writer
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.sinks.place import STAGED, PartPlace, PlaceKind


class ObjectParts:
    """Writes a part beside the published ones and moves it there as a whole."""

    def __init__(self, box: Toolbox) -> None:
        self._box = box

    async def stage(self, place: PartPlace, result: Any) -> None:
        store = await self._store(place)
        with tempfile.TemporaryDirectory(prefix="noetl-sink-") as folder:
            local = Path(folder, "part")
            await _write(local, place, result)
            await obstore.put_async(store, _key(place, place.staged), local)

    async def publish(self, target: PartPlace, parts: Collection[PartPlace]) -> None:
        """A part that is not staged has been published before."""
        store = await self._store(target)
        for place in parts:
            if place.kind is PlaceKind.FILE and place.is_one_file:  # before, so that none is without its mark
                await obstore.put_async(store, _key(place, place.mark), place.part.encode())
            with contextlib.suppress(FileNotFoundError):
                await obstore.rename_async(store, _key(place, place.staged), _key(place, place.published))

    async def staged(self, target: PartPlace, prefix: str) -> set[str]:
        """Names of parts that are not published and begin so."""
        store = await self._store(target)
        names = set()
        async for page in obstore.list(store, prefix=_key(target, str(PurePosixPath(target.folder, STAGED)))):
            names |= {PurePosixPath(found["path"]).stem for found in page}
        return {name for name in names if name.startswith(prefix)}

    async def missing(self, target: PartPlace, parts: Collection[PartPlace]) -> list[str]:
        """Of buckets none: whoever stages there stages for all."""
        if target.kind is not PlaceKind.FILE:
            return []
        return await asyncio.to_thread(_missing, parts)

    async def discard(self, target: PartPlace, names: Collection[str]) -> None:
        store = await self._store(target)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(
                    store, _key(target, target.model_copy(update={"part": name}).staged)
                )

    async def _store(self, place: PartPlace) -> Any:
        if place.kind is PlaceKind.FILE:
            return await asyncio.to_thread(LocalStore, place.folder, mkdir=True)
        credential = await self._box.credentials.resolve(place.auth, CredentialType(place.kind.value))
        return open_bucket(self._box.settings, place.kind, place.bucket, credential)


def _key(place: PartPlace, path: str) -> str:
    """The path as the store knows it: of files relative to their folder."""
    return str(PurePosixPath(path).relative_to(place.folder)) if place.kind is PlaceKind.FILE else path


def _missing(parts: Collection[PartPlace]) -> list[str]:
    missing = [place.part for place in parts if not place.is_one_file and not Path(place.published).exists()]
    replacing = defaultdict(list)
    for place in parts:
        if place.is_one_file:
            replacing[place.mark].append(place.part)
    for mark, names in replacing.items():  # each part replaces the one before: one of them has to be there
        last = Path(mark).read_text() if Path(mark).exists() else ""
        if last not in names and _execution_of(last) < _execution_of(names[0]):
            missing += names
    return missing


def _execution_of(part: str) -> int:
    return int(part.partition(".")[0] or 0)


async def _write(path: Path, place: PartPlace, result: Any) -> None:
    schema = None
    if isinstance(result, StoredRows) and place.format is RowFormat.PARQUET:
        schema = await arrow_schema(batches_of(result))
    writer = row_writer(path, place.format, schema)
    with contextlib.closing(writer):
        async for rows in batches_of(result):
            await asyncio.to_thread(writer.write, rows)
