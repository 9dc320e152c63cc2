"""The Spark session of a run, started while its earlier steps run, and a tiny job that loads its classes."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from noetl_dagster.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


logger = logging.getLogger(__name__)

GROUP = "noetl-rehearsal"  # job group of the early job

_lock = threading.Lock()
_starting: dict[int, threading.Thread] = {}  # by process id: a forked child has none of its parent's threads
_step_runs = threading.Event()
_short = threading.Event()


def start_ahead(
    spark: Callable[[], SparkSession], settings: Settings, *, python_too: bool = False, short: bool = False
) -> bool:
    """Starts the session on a thread and runs a tiny job, so that the first step finds its classes loaded.

    Nothing waits for it and nothing fails with it: a step asks for the session again and reports the error.
    The job ends as soon as a step begins.

    Args:
        spark: returns the session and starts it if there is none.
        python_too: the step will run Python on Spark's workers.
        short: the steps will probably take less than a minute, see :func:`expects_short_steps`.

    Returns:
        True if a thread was started; not if :func:`may_start_ahead` is false.
    """
    with _lock:
        if not may_start_ahead(settings):
            return False
        _step_runs.clear()
        (_short.set if short else _short.clear)()
        thread = threading.Thread(
            target=_start, args=(spark, settings, python_too), name="noetl-spark-ahead", daemon=True
        )
        _starting[os.getpid()] = thread
        thread.start()
        return True


def may_start_ahead(settings: Settings) -> bool:
    """Reports whether there is neither a session nor a thread that starts one; Connect's server already runs."""
    if settings.spark_remote is not None:
        return False
    running = _starting.get(os.getpid())
    return not _has_session() and (running is None or not running.is_alive())


def expects_short_steps() -> bool:
    """Reports whether the steps of this process will probably end before optimised code would pay off."""
    return _short.is_set()


def step_begins() -> None:
    """Ends the early job: from now on a step needs the cores."""
    _step_runs.set()


def _has_session() -> bool:
    """Reports whether PySpark has a session, without importing it: another thread may be importing it now."""
    context_class = getattr(sys.modules.get("pyspark.core.context"), "SparkContext", None)
    return context_class is not None and context_class._active_spark_context is not None


def _start(spark: Callable[[], SparkSession], settings: Settings, python_too: bool) -> None:
    try:
        shared = spark()
        if not hasattr(shared, "_jsparkSession") or not shared.sparkContext.master.startswith("local"):
            return  # a cluster's executors load their own classes
        shared.sparkContext.setJobGroup(GROUP, "before the first step", True)
        session = shared.newSession()
        with TemporaryDirectory(prefix="noetl-rehearsal-", ignore_cleanup_errors=True) as folder:
            _rehearse(session, Path(folder), python_too=python_too, goes_on=lambda: not _step_runs.is_set())
    except Exception as error:
        logger.info("Spark was not started ahead: %s", str(error).partition("\n")[0])


LINES = [
    '{"data": [{"site": "A", "id": "1", "on": "2024-01-31", "size": " 7.5 kg"}, {"site": "B", "id": "2"}]}',
    '{"data": [{"site": "A", "id": "3", "on": "01/31/2024", "size": "n/a"}]}',
]
PAGE = "data ARRAY<STRUCT<site: STRING, id: STRING, on: STRING, size: STRING>>"


def _rehearse(session: SparkSession, folder: Path, *, python_too: bool, goes_on: Callable[[], bool]) -> None:
    """Runs the job: writes, reads, infers and calls; blocks for some seconds on a cold JVM.

    Args:
        folder: an empty folder for its files, which the caller removes.
        python_too: run a Python function on Spark's workers as well.
        goes_on: called between the parts of the job, which ends if this returns False.
    """
    from pyspark.sql import functions as F  # noqa: N812, Spark's own convention

    lines, typed = str(folder / "lines"), str(folder / "typed")
    if not goes_on():
        return
    (folder / "lines").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    page = F.from_json("value", PAGE)
    raw = session.read.text(lines, lineSep="\n")
    record = raw.select(F.explode(page["data"]).alias("record")).select("record.*")
    text = F.when(~F.lower(F.trim("size")).isin("", "n/a"), F.trim("size"))
    columns = record.select(
        "site",
        F.upper("id").alias("id"),
        F.coalesce(F.try_to_date("on", "yyyy-MM-dd"), F.try_to_date("on", "MM/dd/yyyy")).alias("on"),
        F.regexp_extract(text, r"^\s*(-?\d+(?:\.\d+)?)", 1).try_cast("decimal(9,2)").alias("size"),
    )
    distinct = columns.repartition("site").dropDuplicates(["site", "id"])
    distinct.write.partitionBy("site").parquet(typed)
    if not goes_on():
        return
    schema = "id STRING, on DATE, size DECIMAL(9,2), site STRING"
    session.read.schema(schema).parquet(typed).createOrReplaceTempView("typed")
    session.createDataFrame([("A", 1), ("C", 2)], "site STRING, n INT").createOrReplaceTempView("sites")
    session.sql(
        """
        SELECT site, count(*) AS n, sum(size) AS size, max(on) AS last,
               sort_array(collect_list(if(typed.id IS NULL, sites.site, NULL))) AS missing
        FROM sites LEFT JOIN typed USING (site) GROUP BY site ORDER BY site
        """
    ).toArrow()
    if not goes_on():
        return
    session.read.json(lines).selectExpr("inline(data)").where("size IS NOT NULL").toArrow()
    if python_too and goes_on():
        twice = F.udf(lambda number: number * 2, "long")
        session.range(3).select(twice("id").alias("n")).agg({"n": "sum"}).collect()
