"""A state folder of its own, whose services two processes started at the same moment."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.waiting import PROCESS_SECONDS

_STARTER = """
import sys
from pathlib import Path
from noetl_dagster import embedded
from noetl_dagster.settings import Settings

print(embedded.ensure(Settings(home=Path(sys.argv[1]))).model_dump_json())
"""


@pytest.fixture(scope="package")
def home() -> Iterator[Path]:
    """Not below pytest's folder: another session may close that to PostgreSQL's system user."""
    with tempfile.TemporaryDirectory(prefix="noetl-embedded-") as folder:
        yield Path(folder).resolve()
        embedded.down(Settings(home=Path(folder)))


@pytest.fixture(scope="package")
def racers(home: Path) -> list[Settings]:
    """What two processes got that found nothing running and started at once. Both have ended."""
    command = [sys.executable, "-c", _STARTER, str(home)]
    starters = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [starter.communicate(timeout=PROCESS_SECONDS)[0] for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0]
    return [Settings.model_validate_json(output) for output in outputs]


@pytest.fixture
def running(racers: list[Settings], home: Path) -> Settings:
    """Settings of services that run, whatever the test before did to them."""
    return embedded.ensure(Settings(home=home))
