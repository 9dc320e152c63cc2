"""Makes the class-data archive: ``python -m noetl_dagster.spark.archiving``, a process of the lowest priority.

It starts its own driver, runs a tiny job and ends the JVM, which then writes the classes that it has loaded.
Settings come from the environment. No process waits for it; it writes one line to a log.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from noetl_dagster.settings import Settings
from noetl_dagster.spark.ahead import rehearse
from noetl_dagster.spark.class_archive import ClassArchive, archive_for
from noetl_dagster.spark.sessions import SparkSessions, session_config

MEMORY = "512m"
PATIENCE = 600.0  # seconds within which an ending JVM has written its archive, even on a busy machine

QUICKLY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Compiles quickly rather than well: this JVM ends within a minute. Its archive fits other JVMs all the same."""


def make_archive(settings: Settings) -> ClassArchive | None:
    """Makes the archive for these settings, unless it exists or another process makes it.

    This process becomes the driver, so it must have no session. If PySpark fails, nothing is left but a note of the
    reason. Returns None if these settings want no archive.
    """
    archive = archive_for(settings, session_config(settings))
    if archive is None:
        return None
    with archive.making() as mine:
        if not mine or not archive.is_wanted:
            return archive
        try:
            with tempfile.TemporaryDirectory(prefix=f"{archive.file.stem}.making-", dir=archive.file.parent) as draft:
                _make(settings, archive, Path(draft))
        except Exception as error:
            archive.discard(str(error).partition("\n")[0])
            raise
    return archive


def _make(settings: Settings, archive: ClassArchive, draft: Path) -> None:
    from pyspark import SparkContext

    made = draft / "classes.jsa"
    options = f"{QUICKLY} -XX:ArchiveClassesAtExit={made} -Xlog:disable -Xlog:all=error:stderr"
    own = settings.model_copy(
        update={
            "home": draft,
            "spark_master": "local[1]",
            "spark_driver_memory": MEMORY,
            "spark_driver_java_options": f"{settings.spark_driver_java_options} {options}",
        }
    )
    sessions = SparkSessions(own)
    try:
        session = sessions.get()
        files = draft / "files"
        files.mkdir()
        rehearse(session, files, python_too=True)
    finally:
        sessions.stop()
        gateway: Any = SparkContext._gateway
        if gateway is not None:  # the JVM ends regularly, and writes the archive before
            gateway.shutdown()
            if gateway.proc.stdin is not None:
                gateway.proc.stdin.close()
            code = gateway.proc.wait(PATIENCE)
    if code or not made.is_file():
        raise RuntimeError(f"the JVM ended with {code} and wrote {'an' if made.is_file() else 'no'} archive")
    archive.publish(made)


def main() -> None:
    """Makes the archive and reports it on standard output."""
    os.nice(19)
    started = time.monotonic()
    archive = make_archive(Settings())
    seconds = time.monotonic() - started
    print(f"{time.strftime('%F %T')} {archive.file if archive else 'none is wanted'} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
