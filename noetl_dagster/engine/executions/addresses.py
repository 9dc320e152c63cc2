"""Addresses of pages: of executions and their steps in the HTTP API, of runs in Dagster's UI."""

from __future__ import annotations

from urllib.parse import quote

from noetl_dagster.settings import Settings


def executions_url(settings: Settings) -> str:
    """Returns the address of the list of executions."""
    base = settings.pages_url or settings.server_url
    return f"{base.rstrip('/')}/executions"


def execution_url(settings: Settings, execution_id: int | str) -> str:
    """Returns the address of an execution's page."""
    return f"{executions_url(settings)}/{execution_id}"


def step_url(settings: Settings, execution_id: int | str, step: str) -> str:
    """Returns the address of the page of a step of an execution."""
    return f"{execution_url(settings, execution_id)}/steps/{quote(step, safe='')}"


def run_url(settings: Settings, run_id: str) -> str:
    """Returns the address of a run in Dagster's UI."""
    return f"{settings.dagster_url.rstrip('/')}/runs/{quote(run_id, safe='')}"


def asset_url(settings: Settings, asset: str) -> str:
    """Returns the address of an asset in Dagster's UI, given by its key with slashes."""
    return f"{settings.dagster_url.rstrip('/')}/assets/{quote(asset)}"
