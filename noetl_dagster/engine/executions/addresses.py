"""Addresses of pages: of executions and their steps in the HTTP API, of runs in Dagster's UI."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

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
    return f"{execution_url(settings, execution_id)}/steps/{in_path(step)}"


def in_path(text: Any) -> str:
    """Encodes a text as one part of a path; :func:`from_path` decodes what the server found there.

    Servers decode a path before they divide it, and browsers leave out the parts ``.`` and ``..``. So characters that
    would have a meaning are encoded twice.
    """
    once = str(text).replace("%", "%25").replace("/", "%2F")
    return quote(once.replace(".", "%2E") if once in (".", "..") else once, safe="")


def from_path(part: str) -> str:
    """Decodes a part of a path that :func:`in_path` encoded, and the server decoded once."""
    return unquote(part)


def run_url(settings: Settings, run_id: str) -> str:
    """Returns the address of a run in Dagster's UI."""
    return f"{settings.dagster_url.rstrip('/')}/runs/{quote(run_id, safe='')}"


def asset_url(settings: Settings, asset: str) -> str:
    """Returns the address of an asset in Dagster's UI, given by its key with slashes."""
    return f"{settings.dagster_url.rstrip('/')}/assets/{quote(asset)}"
