"""A Spark session that no resource of ours has made, as a project's own code would have one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def session() -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    opened = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    yield opened
    opened.stop()
