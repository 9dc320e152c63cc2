"""The command line as a user runs it: a process of its own, with the test's database and buckets."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import Settings, get_settings
from tests.waiting import PROCESS_SECONDS

Cli = Callable[..., subprocess.CompletedProcess[str]]

COMMAND = [sys.executable, "-m", "noetl_dagster"]

IMPORTED = [
    "noetl_dagster.cli.commands.upkeep",
    "noetl_dagster.cli.commands.executions",
    "noetl_dagster.cli.commands.ingest",
    "noetl_dagster.cli.commands.check",
    "noetl_dagster.cli.commands.authoring",
    "noetl_dagster.cli.commands.run",
    "dagster_postgres",
]


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    """Environment of the processes that the test starts."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    return {**inherited, **embedded.environment(settings)}


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    """Runs ``noetl-dagster`` to its end, in a process forked from one that has imported it: importing takes
    longer than most commands. What the tests start with ``COMMAND`` imports for itself."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(IMPORTED)

    def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
        output, errors = tmp_path / "stdout.txt", tmp_path / "stderr.txt"
        process = forks.Process(target=_command, args=(arguments, environment, tmp_path, output, errors))
        process.start()
        process.join(PROCESS_SECONDS)
        code = process.exitcode
        if code is None:
            process.kill()
            raise subprocess.TimeoutExpired([*COMMAND, *arguments], PROCESS_SECONDS, output.read_bytes())
        return subprocess.CompletedProcess(
            [*COMMAND, *arguments], code, output.read_text(), errors.read_text()
        )

    return cli


def _command(
    arguments: tuple[str, ...], environment: dict[str, str], folder: Path, output: Path, errors: Path
) -> None:
    """Makes this process what ``noetl-dagster <arguments>`` would be."""
    for descriptor, file in ((1, output), (2, errors)):
        with file.open("wb") as opened:
            os.dup2(opened.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["noetl-dagster", *arguments]
    get_settings.cache_clear()
    from noetl_dagster.cli import main

    main()
