"""The engines of this process: one for each set of settings, shared by all its runs."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings, dump_settings, get_settings

T = TypeVar("T")

_engines: dict[tuple[int, str], Engine] = {}
_lock = threading.Lock()


class EngineProvider:
    """Provides the engine of this process to ops, sensors and schedules.

    The engine opens on first use and stays open for later runs. Its coroutines run on the background loop, see
    :func:`noetl_dagster.process.event_loop.run_sync`.

    Args:
        settings: default: the settings of the environment.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings_given = settings

    def given_settings(self) -> Settings | None:
        """Returns the configured settings; None means those of the environment."""
        return self._settings_given

    @property
    def settings(self) -> Settings:
        """The settings with the addresses of the embedded services, which are started if necessary."""
        return embedded.ensure(self.given_settings() or get_settings())

    def engine(self) -> Engine:
        """Returns the engine of this process for these settings, and opens it if necessary."""
        key = os.getpid(), self._key()
        with _lock:
            engine = _engines.get(key)
            if engine is None:
                engine = _engines[key] = run_sync(Engine.open(self.settings))
            return engine

    def close(self) -> None:
        """Commits buffered events and closes the engine of this process for these settings, if it is open."""
        close_engines(self._key())

    def _key(self) -> str:
        settings = self.given_settings()
        return dump_settings(settings) if settings is not None else ""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of the engine and returns its result."""
        return run_sync(coroutine)


def close_engines(settings: str | None = None) -> None:
    """Commits buffered events and closes all engines of this process, or the one for settings as JSON."""
    with _lock:
        for key in list(_engines):
            if key[0] == os.getpid() and settings in (None, key[1]):
                with contextlib.suppress(Exception):
                    run_sync(_engines.pop(key).close(), timeout=20)


atexit.register(close_engines)
