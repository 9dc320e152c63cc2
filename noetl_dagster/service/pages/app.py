"""Adds the pages to the application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from noetl_dagster.service.pages import (
    compare,
    execution,
    executions,
    login,
    playbooks,
    results,
    steps,
    trail,
)
from noetl_dagster.service.pages.live import Feeds
from noetl_dagster.service.pages.rendering import FOLDER
from noetl_dagster.service.pages.workforce import dead_letters, workers

MODULES = (login, executions, execution, steps, results, trail, compare, workers, dead_letters, playbooks)


def add_pages(app: FastAPI) -> None:
    """Adds the routes of the pages, and their static files. ``app.state.stopping`` tells that streams must end."""
    app.state.listings = {}
    app.state.stopping = lambda: False
    app.state.feeds = Feeds(lambda: app.state.plane.engine, lambda: app.state.stopping())
    for module in MODULES:
        app.include_router(module.router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")
