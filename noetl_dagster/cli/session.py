"""The objects that commands need: settings with running services, the engine, and Dagster's instance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.settings import Settings, get_settings

if TYPE_CHECKING:
    from dagster import DagsterInstance  # a second of imports that most commands can do without


@dataclass(frozen=True, slots=True)
class Session:
    """The services of one command. The environment leads child processes to the same ones."""

    settings: Settings
    noetl: EngineProvider

    @property
    def engine(self) -> Engine:
        """The engine of this command."""
        return self.noetl.engine()

    def lead_to_dagster(self) -> None:
        """Sets ``DAGSTER_HOME`` where it is not, for this process and its children."""
        if "DAGSTER_HOME" not in os.environ:
            os.environ["DAGSTER_HOME"] = str(embedded.dagster_home(self.settings))

    @contextmanager
    def dagster(self) -> Iterator[DagsterInstance]:
        """Dagster's instance: ``DAGSTER_HOME`` where it is set, else the one beside the embedded services."""
        from dagster import DagsterInstance

        self.lead_to_dagster()
        with DagsterInstance.get() as instance:
            yield instance


@contextmanager
def open_session(*, quickly: bool = False) -> Iterator[Session]:
    """Starts the services that are needed; commits and closes everything in the end.

    Args:
        quickly: only the event log is needed.
    """
    wanted = get_settings()
    settings = embedded.ensure(wanted, only=["postgres"] if quickly else None)
    os.environ.update(embedded.environment(settings))
    get_settings.cache_clear()
    try:
        yield Session(settings, EngineProvider(settings))
    finally:
        close_engines()
