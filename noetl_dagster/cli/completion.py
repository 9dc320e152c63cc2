"""Values that a shell offers for arguments: playbook files below the folder, and the newest executions.

Completion starts no service, and gives up quietly, since its output replaces the user's input.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from noetl_dagster import embedded
from noetl_dagster.playbook.catalog import SUFFIXES, is_playbook
from noetl_dagster.settings import Settings, get_settings

DEEPEST = 3
"""Folders below the typed one whose files are offered."""

MOST_ENTRIES = 5_000
"""Files and folders that are looked at."""

MOST_OFFERED = 50

MOST_SECONDS = 2.0
"""Time in which the event log must answer."""


def complete_playbooks(incomplete: str) -> list[str]:
    """Returns the playbook files whose path begins with the typed text."""
    largest = get_settings().playbook_bytes
    names = (name for name in _files(incomplete) if name.endswith(SUFFIXES) and Path(name).stat().st_size <= largest)
    return sorted(islice((name for name in names if is_playbook(Path(name))), MOST_OFFERED))


def complete_executions(incomplete: str) -> list[tuple[str, str]]:
    """Returns the newest executions whose id begins with the typed text, with their playbook and status."""
    try:
        return asyncio.run(_newest(get_settings(), incomplete))
    except Exception:  # whatever it is, the shell has no place for it
        return []


def _files(incomplete: str) -> Iterator[str]:
    """Yields the visible files below the typed folder, those of a folder before those of folders in it."""
    folder, slash, _ = incomplete.rpartition("/")
    waiting, looked_at = [(folder + slash, 0)], 0
    while waiting:
        prefix, depth = waiting.pop(0)
        try:
            entries = sorted(os.scandir(prefix or "."), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            looked_at += 1
            name = prefix + entry.name
            if looked_at > MOST_ENTRIES:
                return
            if not name.startswith(incomplete) or entry.name.startswith("."):
                continue
            if entry.is_file():
                yield name
            elif depth < DEEPEST and entry.is_dir(follow_symlinks=False):
                waiting.append((f"{name}/", depth + 1))


async def _newest(settings: Settings, incomplete: str) -> list[tuple[str, str]]:
    url = settings.db_url or embedded.running_db_url(settings)
    if url is None or not (incomplete.isdecimal() or not incomplete):
        return []
    import asyncpg  # which most completions do not need

    from noetl_dagster.engine.executions.listing import ExecutionFilter, list_executions
    from noetl_dagster.events.connection import connect

    async with asyncio.timeout(MOST_SECONDS):
        async with asyncpg.create_pool(url, min_size=0, max_size=1, connect=connect) as pool:
            newest = await list_executions(pool, ExecutionFilter(), MOST_OFFERED)
    offers = [(str(one.execution_id), f"{one.playbook} {one.status}") for one in newest]
    return [offer for offer in offers if offer[0].startswith(incomplete)]
