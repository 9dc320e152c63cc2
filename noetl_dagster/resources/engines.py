"""The engine of a process: one for each set of settings, shared by all the runs there."""

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
    """Gives ops, sensors and schedules the engine of their process.

    The engine opens on first use and stays open for later runs in the same process; its coroutines run on
    the background loop, see :func:`noetl_dagster.process.event_loop.run_sync`.

    Args:
        settings: default: the environment's.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings_given = settings

    def given_settings(self) -> Settings | None:
        """The settings that were given; None: those of the environment."""
        return self._settings_given

    @property
    def settings(self) -> Settings:
        """The settings with the addresses of the embedded services filled in, which are started if need be."""
        return embedded.ensure(self.given_settings() or get_settings())

    def engine(self) -> Engine:
        """The engine of this process for these settings, opened if need be."""
        key = self._key()
        with _lock:
            engine = _engines.get(key)
            if engine is None:
                engine = _engines[key] = run_sync(Engine.open(self.settings))
            return engine

    def close(self) -> None:
        """Closes the engine of this process for these settings, where it is open; what is buffered is committed."""
        with _lock:
            _close(self._key())

    def _key(self) -> tuple[int, str]:
        given = self.given_settings()
        return os.getpid(), dump_settings(given) if given is not None else ""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of the engine and waits for it."""
        return run_sync(coroutine)


def close_engines() -> None:
    """Closes the engines of this process; what is buffered is committed."""
    with _lock:
        for key in [key for key in _engines if key[0] == os.getpid()]:
            _close(key)


def _close(key: tuple[int, str]) -> None:
    engine = _engines.pop(key, None)
    if engine is not None:
        with contextlib.suppress(Exception):
            run_sync(engine.close(), timeout=20)


atexit.register(close_engines)
