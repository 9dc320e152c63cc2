"""The message about the result stores that services print when they start."""

from __future__ import annotations

from noetl_dagster.cli.console import warn
from noetl_dagster.settings import Settings
from noetl_dagster.storage.readiness import unready


async def look_at_stores(settings: Settings) -> None:
    """Makes buckets that are missing and may be made, and warns of stores that cannot be used.

    A service starts all the same: what it cannot store there goes elsewhere, or fails with the same words.
    """
    for line in await unready(settings):
        warn(f"warning: {line}")
