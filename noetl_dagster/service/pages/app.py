"""Adds the pages to the application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from noetl_dagster.service.pages import executions, login
from noetl_dagster.service.pages.rendering import FOLDER

MODULES = (login, executions)


def add_pages(app: FastAPI) -> None:
    """Adds the routes of the pages, and their static files."""
    app.state.listings = {}
    for module in MODULES:
        app.include_router(module.router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")
