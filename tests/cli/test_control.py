"""The upkeep from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.waiting import PROCESS_SECONDS

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    return {**os.environ, **embedded.environment(settings), "NOETL_HOME": str(settings.home)}


@pytest.fixture
def command(environment: dict[str, str]) -> Command:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "noetl_dagster", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROCESS_SECONDS,
        )

    return command


def test_each_does_what_is_due_and_says_so(command: Command) -> None:
    for arguments, said in (
        (["project", "--rebuild"], "events projected"),
        (["reap", "--once"], "0 silent commands given to others"),
        (["maintain"], "partitions made: none"),
    ):
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_the_projection_service_ends_with_a_signal(environment: dict[str, str]) -> None:
    service: Any = subprocess.Popen(
        [sys.executable, "-m", "noetl_dagster", "project"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert "projecting" in service.stdout.readline()
    service.send_signal(signal.SIGTERM)
    assert service.wait(60) == 0
