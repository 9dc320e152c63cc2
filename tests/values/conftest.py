"""An engine on a database of its own, as the tests of the engine have it."""

from tests.engine.conftest import engine, run, settings

__all__ = ["engine", "run", "settings"]
