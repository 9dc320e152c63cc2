"""The class-data archive: what a driver's JVM has read and verified of Spark's classes, kept for the next one.

Two thirds of what a short Spark job costs on a cold JVM is loading classes. Java keeps loaded classes in a file
that later JVMs map into memory (JEP 350, ``-XX:ArchiveClassesAtExit`` and ``-XX:SharedArchiveFile``). One is
made for each Java, PySpark and set of jars, by a process of its own (:mod:`noetl_dagster.spark.archiving`).

A JVM leaves an archive of another Java or class path aside, but it crashes on half of one. So a note beside the
archive says how large it has to be, and is written last.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from noetl_dagster.settings import Settings

QUIET = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""JVM options: an archive that does not fit is left aside without a word."""

MEMORY_TO_MAKE = 3 * 1024**3
"""Bytes that must be free, here and in the container: making one takes 1.2 GB for a minute."""

PAUSE_AFTER_FAILURE = 24 * 3600
"""Seconds after which an archive that could not be made is tried again."""

CONTAINER = Path("/sys/fs/cgroup")
"""Where a container finds its limits (control groups, version 2)."""

_OWN_OPTIONS = ("SharedArchiveFile", "ArchiveClassesAtExit", "-Xshare", "SharedClassListFile")
_CLASS_PATH = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath", "spark.submit.pyFiles")
"""Settings of Spark that may put other jars before its own."""


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """Where the archive of one Java, PySpark and set of jars is, made or not.

    Attributes:
        file: of some 200 MB, mapped by every driver that starts with it.
    """

    file: Path

    @property
    def note(self) -> Path:
        """Says how large the archive is; without it there is none."""
        return self.file.with_suffix(".json")

    @property
    def failure(self) -> Path:
        """Says why the archive could not be made."""
        return self.file.with_suffix(".failed")

    @property
    def is_made(self) -> bool:
        """Whether the archive is there as it was made, to its size and time."""
        try:
            said = json.loads(self.note.read_text(encoding="utf-8"))
            found = self.file.stat()
        except (OSError, ValueError):
            return False
        return bool(said == {"bytes": found.st_size, "modified": found.st_mtime_ns})

    @property
    def is_wanted(self) -> bool:
        """Whether it is not there, and no attempt of the last day has failed."""
        if self.is_made:
            return False
        try:
            return time.time() - self.failure.stat().st_mtime > PAUSE_AFTER_FAILURE
        except OSError:
            return True

    def java_options(self) -> str:
        """JVM options that use the archive; empty where there is none."""
        return f"-XX:SharedArchiveFile={self.file} {QUIET}" if self.is_made else ""

    def publish(self, made: Path) -> None:
        """Puts a finished archive in its place. A JVM that starts meanwhile goes without."""
        self.note.unlink(missing_ok=True)
        made.replace(self.file)
        found = self.file.stat()
        draft = self.note.with_suffix(".json.tmp")
        draft.write_text(json.dumps({"bytes": found.st_size, "modified": found.st_mtime_ns}))
        draft.replace(self.note)
        self.failure.unlink(missing_ok=True)

    def discard(self, why: str) -> None:
        """Takes an archive away with which a JVM did not start, or says why there is none."""
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.note.unlink(missing_ok=True)
            self.failure.write_text(why + "\n", encoding="utf-8")
            self.file.unlink(missing_ok=True)

    @contextmanager
    def making(self) -> Iterator[bool]:
        """Within the block no other process makes this archive; False where one does already.

        What processes that were killed have left is removed.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            for left in self.file.parent.glob(f"{self.file.stem}.making-*"):
                shutil.rmtree(left, ignore_errors=True)
            yield True


def archive_for(settings: Settings, config: Mapping[str, str]) -> ClassArchive | None:
    """The archive that a driver with this configuration may start with.

    None where nobody wants one: on Connect, where the settings say so, where the driver's Java options are the
    user's own or name another archive, and where no Java is found.

    Args:
        config: of the session, see :func:`noetl_dagster.spark.sessions.session_config`.
    """
    options = config.get("spark.driver.extraJavaOptions", "")
    given = "spark.driver.extraJavaOptions" in settings.spark_config
    if not settings.spark_class_archive or settings.spark_remote is not None or given:
        return None
    if any(name in options for name in _OWN_OPTIONS):
        return None
    java = _java()
    if java is None:
        return None
    import pyspark

    key = hashlib.sha256()
    key.update(_installation(java, os.environ.get("SPARK_HOME", "")).encode())
    key.update(json.dumps({name: config.get(name) for name in _CLASS_PATH}).encode())
    folder = settings.home.absolute() / "spark" / "classes"
    return ClassArchive(folder / f"spark-{pyspark.__version__}-{key.hexdigest()[:16]}.jsa")


def has_memory() -> bool:
    """Whether an archive can be made beside everything else that runs here."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return bool(free >= MEMORY_TO_MAKE)


def _java() -> Path | None:
    """The Java that ``spark-class`` takes, links followed."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    return Path(found).resolve() if found is not None and Path(found).is_file() else None


@cache
def _installation(java: Path, spark_home: str) -> str:
    """Java and Spark's jars by name, size and time, which is what a JVM compares."""
    import pyspark

    root = Path(spark_home) if spark_home else Path(pyspark.__file__).parent
    files = [java, *sorted(java.parents[1].glob("lib/**/libjvm.so")), *sorted((root / "jars").glob("*.jar"))]
    marks = [(str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    return json.dumps([marks, os.environ.get("SPARK_DIST_CLASSPATH", "")])
