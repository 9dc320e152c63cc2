"""Registered playbooks: versions by content, and the table of before brought along."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_dagster.errors import PlaybookError
from noetl_dagster.events.catalog import RegisteredPlaybooks, Registration, draft_of
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from tests.playbooks import text_of


def text(result: int) -> str:
    code = f'tool: {{kind: python, code: "result = {result}"}}'
    return text_of("one", f"\nworkflow:\n  - step: start\n    {code}\n")


@pytest.fixture
def registered(pool: asyncpg.Pool[Any], ids: Snowflake) -> RegisteredPlaybooks:
    return RegisteredPlaybooks(pool, ids)


async def registering(registered: RegisteredPlaybooks, content: str) -> Registration:
    return await registered.register(draft_of(content))


async def test_only_another_content_becomes_the_next_version(registered: RegisteredPlaybooks) -> None:
    outcomes = [await registering(registered, text(result)) for result in (1, 1, 2, 2, 1)]

    assert [(one.version.reference, one.new) for one in outcomes] == [
        ("tests/one@1", True),
        ("tests/one@1", False),
        ("tests/one@2", True),
        ("tests/one@2", False),
        ("tests/one@3", True),  # what was taken back is the latest again
    ]
    assert outcomes[0].version.sha256 == outcomes[4].version.sha256


async def test_what_it_says_to_those_who_query_it(registered: RegisteredPlaybooks, pool: asyncpg.Pool[Any]) -> None:
    await registering(registered, text(1))

    row = await pool.fetchrow("SELECT path, version, kind, content, payload, meta, created_at FROM noetl.catalog")

    assert row["created_at"] is not None
    assert dict(row) | {"created_at": None} == {
        "path": "tests/one",
        "version": 1,
        "kind": "Playbook",
        "content": text(1),
        "payload": {
            "apiVersion": "noetl.io/v2",
            "kind": "Playbook",
            "metadata": {"name": "one", "path": "tests/one"},
            "workflow": [{"step": "start", "tool": {"kind": "python", "code": "result = 1"}}],
        },
        "meta": {"name": "one", "path": "tests/one"},
        "created_at": None,
    }


async def test_many_at_once_get_versions_without_a_gap(registered: RegisteredPlaybooks) -> None:
    outcomes = await asyncio.gather(*(registering(registered, text(result)) for result in range(12)))

    assert sorted(one.version.version for one in outcomes) == list(range(1, 13))


async def test_a_reference_means_a_version(registered: RegisteredPlaybooks) -> None:
    for result in (1, 2):
        await registering(registered, text(result))

    for reference, result in {
        "tests/one@1": 1, "tests/one@2": 2, "tests/one": 2, "tests/one@latest": 2, "/tests/one@1": 1,
    }.items():  # fmt: skip
        assert (await registered.load(reference)).source == text(result)
    assert (await registered.load("tests/one")).file == "tests/one@2"
    with pytest.raises(PlaybookError, match=r"'tests/one' has no version 7; it has 2, 1"):
        await registered.load("tests/one@7")
    with pytest.raises(PlaybookError, match=r"'tests/oen' is not registered; did you mean 'tests/one'"):
        await registered.load("tests/oen")


async def test_a_path_that_looks_like_a_version_is_refused() -> None:
    for ending in ("@2", "@latest"):
        with pytest.raises(PlaybookError, match="ends like a version"):
            draft_of(text(1).replace("path: tests/one", f"path: tests/one{ending}"))


async def test_what_runs_is_the_registered_text_where_it_is_the_same(
    registered: RegisteredPlaybooks, log: EventLog
) -> None:
    ran = await log.put_source("tests/one", None, text(1))
    assert await log.put_source("tests/one", None, text(1)) == ran
    found = await registered.that_ran("tests/one")
    assert found is not None
    assert found.source == text(1)
    assert await registered.find("tests/one") is None

    version = (await registering(registered, text(1))).version

    assert version.version == 1
    assert await log.put_source("tests/one", None, text(1)) == int(version.catalog_id)
    assert await log.source(ran) == (text(1), "tests/one", None)
    draft = await log.put_source("tests/one", None, text(2))
    assert draft not in (ran, int(version.catalog_id))
    latest = await registered.that_ran("tests/one")
    assert latest is not None
    assert latest.source == text(1), "a text that only ran is no version"


async def test_listings_go_on_where_they_ended(registered: RegisteredPlaybooks) -> None:
    for name in ("one", "three", "two"):
        for result in (1, 2, 3):
            await registering(registered, text(result).replace("tests/one", f"tests/{name}"))

    page = await registered.latest(2)
    rest = await registered.latest(2, after=page[-1].path)

    assert [one.reference for one in (*page, *rest)] == ["tests/one@3", "tests/three@3", "tests/two@3"]
    assert [one.version for one in await registered.versions("tests/one", 2)] == [3, 2]
    assert [one.version for one in await registered.versions("tests/one", 9, after=2)] == [3]


def test_a_broken_text_is_refused_with_every_problem(tmp_path: Path) -> None:
    broken = text(1).replace("python,", "pyhton,").replace("kind: Playbook", "kind: Playbok")

    with pytest.raises(PlaybookError) as refused:
        draft_of(broken, file="one.yaml")

    assert len(refused.value.problems) == 2
    assert str(refused.value).startswith("one.yaml:2:")
