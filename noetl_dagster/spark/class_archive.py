"""The class-data archive: Spark's classes as a driver's JVM has read and verified them, stored for the next JVM.

Loading classes takes two thirds of the time of a short Spark job on a cold JVM. Java keeps loaded classes in a file
that later JVMs map into memory (JEP 350, ``-XX:ArchiveClassesAtExit`` and ``-XX:SharedArchiveFile``). One is
made for each Java, PySpark and set of jars, by a process of its own (:mod:`noetl_dagster.spark.archiving`).

A JVM ignores an archive of another Java or class path, but it crashes on an incomplete one. So a note next to the
archive, which is written last, contains its size.
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

from noetl_dagster.private_files import private_folder
from noetl_dagster.settings import Settings

QUIET = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""JVM options: an archive that does not fit is ignored silently."""

MEMORY_TO_MAKE = 3 * 1024**3
"""Bytes that must be free, on the machine and in the container: making one takes 1.2 GB for a minute."""

PAUSE_AFTER_FAILURE = 24 * 3600  # seconds before another attempt
CONTAINER = Path("/sys/fs/cgroup")  # with a container's limits (control groups, version 2)

_OWN_OPTIONS = ("SharedArchiveFile", "ArchiveClassesAtExit", "-Xshare", "SharedClassListFile")

# settings of Spark that may add jars before its own
_CLASS_PATH = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath", "spark.submit.pyFiles")


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """The archive of one Java, PySpark and set of jars: a file of some 200 MB, which may not exist yet."""

    file: Path

    @property
    def note(self) -> Path:
        """Returns the file with the archive's size; without it the archive does not count."""
        return self.file.with_suffix(".json")

    @property
    def failure(self) -> Path:
        """Returns the file with the reason why the archive could not be made."""
        return self.file.with_suffix(".failed")

    @property
    def is_made(self) -> bool:
        """Reports whether the archive exists with its original size and time."""
        try:
            noted = json.loads(self.note.read_text(encoding="utf-8"))
            found = self.file.stat()
        except (OSError, ValueError):
            return False
        return bool(noted == {"bytes": found.st_size, "modified": found.st_mtime_ns})

    @property
    def is_wanted(self) -> bool:
        """Reports whether it does not exist and no attempt of the last day has failed."""
        if self.is_made:
            return False
        try:
            return time.time() - self.failure.stat().st_mtime > PAUSE_AFTER_FAILURE
        except OSError:
            return True

    def java_options(self) -> str:
        """Returns JVM options that use the archive; empty if there is none."""
        return f"-XX:SharedArchiveFile={self.file} {QUIET}" if self.is_made else ""

    def publish(self, made: Path) -> None:
        """Moves a finished archive to its place. A JVM that starts meanwhile does not use it."""
        self.note.unlink(missing_ok=True)
        made.replace(self.file)
        found = self.file.stat()
        draft = self.note.with_suffix(".json.tmp")
        draft.write_text(json.dumps({"bytes": found.st_size, "modified": found.st_mtime_ns}))
        draft.replace(self.note)
        self.failure.unlink(missing_ok=True)

    def discard(self, why: str) -> None:
        """Removes an archive with which a JVM did not start, or records why there is none."""
        with suppress(OSError):
            private_folder(self.file.parent)
            self.note.unlink(missing_ok=True)
            self.failure.write_text(why + "\n", encoding="utf-8")
            self.file.unlink(missing_ok=True)

    @contextmanager
    def making(self) -> Iterator[bool]:
        """Locks the archive while the block makes it; yields False if another process makes it already.

        Removes the remains of killed processes.
        """
        private_folder(self.file.parent)
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
    """Returns the archive that a driver with this configuration may start with.

    None for Connect, if the settings disable it, if the driver's Java options are the user's own or name another
    archive, and if no Java is found.
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
    """Reports whether there is enough memory to make an archive."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return bool(free >= MEMORY_TO_MAKE)


def _java() -> Path | None:
    """Returns the Java that ``spark-class`` uses, links followed."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    return Path(found).resolve() if found is not None and Path(found).is_file() else None


@cache
def _installation(java: Path, spark_home: str) -> str:
    """Returns Java and Spark's jars by name, size and time, which a JVM compares."""
    import pyspark

    root = Path(spark_home) if spark_home else Path(pyspark.__file__).parent
    files = [java, *sorted(java.parents[1].glob("lib/**/libjvm.so")), *sorted((root / "jars").glob("*.jar"))]
    marks = [(str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    return json.dumps([marks, os.environ.get("SPARK_DIST_CLASSPATH", "")])
