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

from noetl_dagster.tools.access.clients import open_bucket
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.rows.arrow import arrow_schema
from noetl_dagster.tools.rows.batches import StoredResult, batches_of
from noetl_dagster.tools.rows.files import row_writer
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.sinks.place import STAGED, PartPlace, SinkKind

_DRAFT = "#"
"""In the names of files that obstore writes, until they are complete. Names of parts do not contain it."""


class ObjectParts:
    """A :class:`~noetl_dagster.tools.sinks.place.PartTarget` in a folder, which renames parts to publish them."""

    def __init__(self, context: ToolContext) -> None:
        self._tool_context = context

    async def stage(self, place: PartPlace, result: Any) -> None:
        """Writes a local file, and uploads it as a whole."""
        store = await self._store(place)
        schema = None
        if isinstance(result, StoredResult) and place.format is RowFormat.PARQUET:
            schema = await arrow_schema(batches_of(result))
        with tempfile.TemporaryDirectory(prefix="noetl-sink-") as folder:
            local = Path(folder, "part")
            with contextlib.closing(row_writer(local, place.format, schema)) as writer:
                async for rows in batches_of(result):
                    await asyncio.to_thread(writer.write, rows)
            await obstore.put_async(store, _key(place, place.staged), local)

    async def publish(self, target: PartPlace, parts: Collection[PartPlace]) -> None:
        """Renames staged parts; a part that is not staged has been published before."""
        store = await self._store(target)
        for place in parts:
            if place.kind is SinkKind.FILE and place.is_one_file:
                # written first, so that every published part has its marker
                await obstore.put_async(store, _key(place, place.mark), place.part.encode())
            with contextlib.suppress(FileNotFoundError):
                await obstore.rename_async(store, _key(place, place.staged), _key(place, place.published))

    async def staged(self, target: PartPlace, prefix: str) -> set[str]:
        """Returns the names of staged parts with a prefix."""
        store = await self._store(target)
        names = set()
        async for page in obstore.list(store, prefix=_key(target, str(PurePosixPath(target.folder, STAGED)))):
            names |= {PurePosixPath(entry["path"]).stem for entry in page}
        if target.kind is SinkKind.FILE:
            names |= await asyncio.to_thread(_drafts, target)
        return {name for name in names if name.startswith(prefix)}

    async def missing(self, target: PartPlace, parts: Collection[PartPlace]) -> list[str]:
        """Returns the names of parts that are not in a local folder; of a bucket none, since all processes share it."""
        if target.kind is not SinkKind.FILE:
            return []
        return await asyncio.to_thread(_missing, parts)

    async def discard(self, target: PartPlace, names: Collection[str]) -> None:
        """Deletes staged parts."""
        store = await self._store(target)
        for name in names:
            if _DRAFT in name:
                await asyncio.to_thread(Path(target.folder, STAGED, name).unlink, missing_ok=True)
                continue
            staged = target.model_copy(update={"part": name}).staged
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(store, _key(target, staged))

    async def _store(self, place: PartPlace) -> Any:
        if place.kind is SinkKind.FILE:
            return await asyncio.to_thread(LocalStore, place.folder, mkdir=True)
        credential = await self._tool_context.credentials.resolve(place.auth, CredentialType(place.kind.value))
        return open_bucket(self._tool_context.settings, place.kind, place.bucket, credential)


def _key(place: PartPlace, path: str) -> str:
    """Returns the key of a path in the store; that of a file is relative to its folder."""
    return str(PurePosixPath(path).relative_to(place.folder)) if place.kind is SinkKind.FILE else path


def _drafts(target: PartPlace) -> set[str]:
    """Returns the files that killed processes were writing into a folder; obstore does not list them."""
    return {path.name for path in Path(target.folder, STAGED).glob(f"*{_DRAFT}*")}


def _missing(parts: Collection[PartPlace]) -> list[str]:
    missing = []
    replacing = defaultdict(list)
    for place in parts:
        if place.is_one_file:
            replacing[place.mark].append(place.part)
        elif not Path(place.published).exists():
            missing.append(place.part)
    for mark, names in replacing.items():  # each part replaces the one before, so one of them has to be there
        last = Path(mark).read_text() if Path(mark).exists() else ""
        if last not in names and _execution_of(last) < _execution_of(names[0]):
            missing += names
    return missing


def _execution_of(part: str) -> int:
    return int(part.partition(".")[0] or 0)
