"""Tags of runs that say who launched them, and which comes first."""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHER_TAG = "noetl/run_server"
"""Run tag that names the run server which was given the run."""

PRIORITY_TAG = "dagster/priority"
"""Run tag of Dagster's own queue: the run with the larger number goes first."""


def priority_of(tags: Mapping[str, str]) -> int:
    """Priority of a run by its tags; 0 where there is none, or none that is a number."""
    try:
        return int(tags.get(PRIORITY_TAG, "0"))
    except ValueError:
        return 0
