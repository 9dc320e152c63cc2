"""Registered playbooks in ``noetl.catalog``: numbered versions of each path."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg
from pydantic import BaseModel

from noetl_dagster.errors import Place, PlaybookError, Problem, ProblemKind
from noetl_dagster.events import queries
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.playbook.catalog import names_version, split_version
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.loader import parse_playbook, parse_report, required
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.wording import did_you_mean

_LENIENT = "lenient"
"""Key of a row's ``meta`` beside the playbook's metadata: it was registered leniently."""


class PlaybookVersion(BaseModel, frozen=True):
    """A registered text of a playbook.

    Attributes:
        catalog_id: identifies the text.
        path: ``metadata.path`` of the playbook.
        version: counts from 1 for each path.
        kind: ``Playbook``.
        sha256: of the text.
        created_at: time of the registration.
        meta: the playbook's metadata.
        content: the text; null in lists.
    """

    catalog_id: str
    path: str
    version: int
    kind: str
    sha256: str
    created_at: datetime
    meta: dict[str, Any] = {}
    content: str | None = None

    @property
    def reference(self) -> str:
        """``path@version``, by which it can be run."""
        return f"{self.path}@{self.version}"


class Registration(NamedTuple):
    """The result of a registration; ``new`` is false if the text was already the latest version."""

    version: PlaybookVersion
    new: bool


class RegisteredPlaybooks:
    """The versions of playbooks in a database."""

    def __init__(self, pool: asyncpg.Pool, ids: Snowflake) -> None:
        self._pool = pool
        self._ids = ids

    async def register(self, draft: PlaybookDraft) -> Registration:
        """Makes a text the latest version of its path, unless it already is, with the same choice of ``lenient``."""
        digest = hashlib.sha256(draft.content.encode()).hexdigest()
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(queries.CATALOG_LOCK, draft.path)
            latest = await connection.fetchrow(queries.CATALOG_VERSION, draft.path, None, 1)
            chosen = (digest, _is_lenient(draft.meta))
            if latest is not None and (latest["sha256"], _is_lenient(latest["meta"])) == chosen:
                return Registration(_version(latest), new=False)
            number = latest["version"] + 1 if latest is not None else 1
            values = (draft.path, number, draft.content, draft.payload, draft.meta, draft.model, digest)
            row = await connection.fetchrow(queries.CATALOG_REGISTER, self._ids.next(), *values)
        return Registration(_version(row), new=True)

    async def find(self, reference: str) -> PlaybookVersion | None:
        """Returns a version with its content: ``path@2``, or the latest by ``path@latest`` or ``path``."""
        path, version = split_version(reference)
        row = await self._pool.fetchrow(queries.CATALOG_VERSION, path, version, 1)
        return _version(row) if row is not None else None

    async def load(self, reference: str, *, lenient: bool = False) -> Playbook:
        """Returns the playbook of a version; messages about it name it as ``path@version``.

        Args:
            lenient: load it leniently even if it was not registered so.

        Raises:
            PlaybookError: no such version is registered; the message names those that are.
        """
        path, version = split_version(reference)
        playbook = await self._load(path, version, 1, lenient)
        if playbook is None:
            missing = ProblemKind.MISSING_PLAYBOOK
            raise PlaybookError([Problem(Place(reference, 1), await self._missing(reference), kind=missing)])
        return playbook

    async def that_ran(self, path: str, *, lenient: bool = False) -> Playbook | None:
        """Returns the latest version of a path; if none is registered, the newest text that ran under it."""
        return await self._load(path, None, 0, lenient)

    async def _load(self, path: str, version: int | None, least: int, lenient: bool) -> Playbook | None:
        row = await self._pool.fetchrow(queries.CATALOG_VERSION, path, version, least)
        if row is None:
            return None
        file, lenient = f"{path}@{row['version']}" if row["version"] else path, lenient or _is_lenient(row["meta"])
        return await asyncio.to_thread(parse_playbook, row["content"], file=file, lenient=lenient, model=row["model"])

    async def versions(self, path: str, limit: int, *, after: int = 0) -> list[PlaybookVersion]:
        """Returns the versions of a path with a number above ``after``, the newest first."""
        rows = await self._pool.fetch(queries.CATALOG_VERSIONS, path, after, limit)
        return [_version(row) for row in rows]

    async def latest(self, limit: int, *, after: str = "") -> Sequence[PlaybookVersion]:
        """Returns the latest version of each path that comes after ``after``, in the order of the paths."""
        rows = await self._pool.fetch(queries.CATALOG_LATEST, after, limit)
        return [_version(row) for row in rows]

    async def _missing(self, reference: str) -> str:
        path, version = split_version(reference)
        numbers = [str(one.version) for one in await self.versions(path, 20)]
        if numbers:
            return f"playbook {path!r} has no version {version}; it has {', '.join(numbers)}"
        paths = tuple(row["path"] for row in await self._pool.fetch(queries.CATALOG_NEAR))
        hint = did_you_mean(path, paths) or "register it with 'noetl-dagster register FILE'"
        return f"playbook {path!r} is not registered; {hint}"


class PlaybookDraft(NamedTuple):
    """The text of a valid playbook, ready for registration."""

    path: str
    content: str
    payload: dict[str, Any]
    meta: dict[str, Any]
    model: str | None = None
    warnings: tuple[str, ...] = ()


def draft_of(content: str, *, file: str = "<playbook>", lenient: bool = False) -> PlaybookDraft:
    """Checks a text, named ``file`` in messages, as ``noetl-dagster check`` does.

    Raises:
        PlaybookError: it is invalid; the error lists every problem.
    """
    playbook = required(*parse_report(content, file=file, code=True, lenient=lenient))
    path = playbook.metadata.path.strip("/")
    if names_version(path):
        place = Place(file, 1)
        raise PlaybookError([Problem(place, f"metadata.path {path!r} ends like a version; take another")])
    payload = Document(content, file).root
    meta = {key: value for key, value in (payload.get("metadata") or {}).items() if key != _LENIENT}
    if lenient:
        meta[_LENIENT] = True
    return PlaybookDraft(path, content, payload, meta, playbook.stored, playbook.warnings)


def _is_lenient(meta: Mapping[str, Any]) -> bool:
    return bool(meta.get(_LENIENT))


def _version(row: Any) -> PlaybookVersion:
    return PlaybookVersion.model_validate({**row, "catalog_id": str(row["catalog_id"])})
