"""Makes the class-data archive: ``python -m noetl_dagster.spark.archiving``, a process of the lowest priority.

It starts a driver of its own, gives it a tiny job and lets its JVM end, which writes the classes that it has
loaded. Settings come from the environment. Nobody waits for it, and it leaves one line in a log.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from noetl_dagster.settings import Settings
from noetl_dagster.spark.ahead import rehearse
from noetl_dagster.spark.class_archive import ClassArchive, archive_for
from noetl_dagster.spark.sessions import SparkSessions, session_config

MEMORY = "512m"
QUICKLY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Compiles quickly rather than well: this JVM ends in a minute. What it keeps fits others all the same."""

PATIENCE = 600.0
"""Seconds in which a JVM that ends has written what it has loaded, however busy the machine is."""


def make_archive(settings: Settings) -> ClassArchive | None:
    """Makes the archive for these settings, unless it is there or another process makes it; None where none
    is wanted.

    The driver is this process's own: it must have no session.

    Raises:
        Exception: what PySpark raises; the archive's ``failure`` then says so, and nothing is left.
    """
    archive = archive_for(settings, session_config(settings))
    if archive is None:
        return None
    with archive.making() as mine:
        if not mine or not archive.is_wanted:
            return archive
        try:
            with tempfile.TemporaryDirectory(
                prefix=f"{archive.file.stem}.making-", dir=archive.file.parent
            ) as draft:
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
        gateway = SparkContext._gateway
        if gateway is not None:
            code = _ended(gateway)
    if code or not made.is_file():
        raise RuntimeError(f"the JVM ended with {code} and wrote {'an' if made.is_file() else 'no'} archive")
    archive.publish(made)


def _ended(gateway: object) -> int:
    """Ends PySpark's JVM as its own end would, and waits until it has written the archive."""
    process: subprocess.Popen[bytes] = gateway.proc  # type: ignore[attr-defined]
    gateway.shutdown()  # type: ignore[attr-defined]
    if process.stdin is not None:
        process.stdin.close()
    return process.wait(PATIENCE)


def main() -> None:
    os.nice(19)
    started = time.monotonic()
    archive = make_archive(Settings())
    seconds = time.monotonic() - started
    print(f"{time.strftime('%F %T')} {archive.file if archive else 'none is wanted'} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
