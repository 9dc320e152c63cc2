"""The newest executions, which a shell offers for arguments. It completes files by itself.

Completion starts no service, and gives up quietly, since its output replaces the user's input.
"""

from __future__ import annotations

import asyncio

from noetl_dagster import embedded
from noetl_dagster.settings import Settings, get_settings

MOST_OFFERED = 50

MOST_SECONDS = 2.0
"""Time in which the event log must answer."""


def complete_executions(incomplete: str) -> list[tuple[str, str]]:
    """Returns the newest executions whose id begins with the typed text, with their playbook and status."""
    try:
        return asyncio.run(_newest(get_settings(), incomplete))
    except Exception:  # whatever it is, the shell has no place for it
        return []


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
