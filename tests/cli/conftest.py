"""The command line as a user runs it: a process of its own, with the test's database and buckets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.forked import run

Cli = Callable[..., subprocess.CompletedProcess[str]]

COMMAND = [sys.executable, "-m", "noetl_dagster"]


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    """Environment of the processes that the test starts."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    return {**inherited, **embedded.environment(settings)}


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    """Runs ``noetl-dagster`` to its end. What the tests start with ``COMMAND`` imports for itself."""
    return partial(run, "noetl-dagster", environment=environment, folder=tmp_path, texts=tmp_path)
