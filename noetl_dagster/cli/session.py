"""The objects that commands need: settings with running services, and the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from noetl_dagster import embedded
from noetl_dagster.cli.console import announce_start
from noetl_dagster.engine.engine import Engine
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.settings import Settings, get_settings


@dataclass(frozen=True, slots=True)
class Session:
    """The services of one command. The environment gives child processes the same ones."""

    settings: Settings
    noetl: EngineProvider

    @property
    def engine(self) -> Engine:
        """The engine of this command."""
        return self.noetl.engine()

    def lead_to_dagster(self) -> None:
        """Sets ``DAGSTER_HOME`` for this process and its children, unless it is set."""
        if "DAGSTER_HOME" not in os.environ:
            os.environ["DAGSTER_HOME"] = str(embedded.dagster_home(self.settings))


@contextmanager
def open_session(*, quickly: bool = False) -> Iterator[Session]:
    """Starts the required services, if ``quickly`` only the event log; commits and closes everything at the end."""
    settings = embedded.ensure(get_settings(), ["postgres"] if quickly else None, announce_start)
    os.environ.update(embedded.environment(settings))
    get_settings.cache_clear()
    try:
        yield Session(settings, EngineProvider(settings))
    finally:
        close_engines()
