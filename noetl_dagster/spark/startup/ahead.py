"""The session that a run will need, started while its earlier steps run, and its classes loaded."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from noetl_dagster.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

GROUP = "noetl-rehearsal"
"""Job group of what is done ahead."""

_lock = threading.Lock()
_starting: dict[int, threading.Thread] = {}
"""By process: a forked child has none of its parent's threads."""

_step_runs = threading.Event()


def start_ahead(spark: Callable[[], SparkSession], settings: Settings, *, python_too: bool = False) -> bool:
    """Starts the session on a thread, then does a tiny job, so that the first step finds its classes loaded.

    Nothing waits for it and nothing fails with it: a step asks for the session again, and says what is wrong.
    The job ends as soon as a step begins.

    Args:
        spark: gives the session, and starts it where there is none.
        python_too: the step will run Python on Spark's workers.

    Returns:
        Whether a thread was started: not on Connect, whose server runs already, nor where there is a session.
    """
    if settings.spark_remote is not None or not settings.spark_start_ahead:
        return False
    with _lock:
        running = _starting.get(os.getpid())
        if _has_session() or (running is not None and running.is_alive()):
            return False
        _step_runs.clear()
        thread = threading.Thread(
            target=_start, args=(spark, settings, python_too), name="noetl-spark-ahead", daemon=True
        )
        _starting[os.getpid()] = thread
        thread.start()
        return True


def step_begins() -> None:
    """Ends the job that is done ahead: the cores are a step's from now on."""
    _step_runs.set()


def _has_session() -> bool:
    """Whether PySpark has one, without importing it; another thread may be half way through importing it."""
    context_class = getattr(sys.modules.get("pyspark.core.context"), "SparkContext", None)
    return context_class is not None and context_class._active_spark_context is not None


def _start(spark: Callable[[], SparkSession], settings: Settings, python_too: bool) -> None:
    folder = None
    try:
        shared = spark()
        if not hasattr(shared, "_jsparkSession") or not shared.sparkContext.master.startswith("local"):
            return  # what a cluster's executors load is theirs
        from noetl_dagster.spark.startup.workload import rehearse

        folder = Path(tempfile.mkdtemp(prefix="noetl-rehearsal-"))
        shared.sparkContext.setJobGroup(GROUP, "before the first step", True)
        session = shared.newSession()
        rehearse(session, folder, python_too=python_too, goes_on=lambda: not _step_runs.is_set())
    except Exception as error:
        logger.info("Spark was not started ahead: %s", str(error).partition("\n")[0])
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
