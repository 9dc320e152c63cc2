"""A store on the background loop, and a Spark session as a project's own code would have one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from noetl_dagster.events.connection import open_pool
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings
from noetl_dagster.storage.store import ResultStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def shared(settings: Settings) -> Iterator[ResultStore]:
    """A store on the background loop, as a process that runs ops has it."""
    assert settings.db_url is not None
    pool = run_sync(open_pool(settings.db_url, size=2))
    yield ResultStore(settings, pool)
    pool.terminate()


@pytest.fixture(scope="module")
def session() -> Iterator[SparkSession]:
    """One that no resource of ours has made."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    opened = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    yield opened
    opened.stop()
