"""Stored objects as files on this machine's disk, for a Spark whose tasks run in this process's JVM.

The JVM's own readers and writers are several times faster than a data source in Python, which starts a Python
process for planning and one for each task. So the objects that a call reads are first fetched, verified and written to
files, and a dataset is written here and published afterwards. Tasks on other machines use the data source
(:mod:`noetl_dagster.spark.results`) instead.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import psutil

from noetl_dagster.private_files import private_folder
from noetl_dagster.settings import Settings
from noetl_dagster.spark.results import AT_ONCE, StoredPart, lines_of, read_ahead
from noetl_dagster.storage import locations

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGEST = 16 * 1024 * 1024
"""Stored bytes of the largest JSON or text object that is staged: it is held in memory while it is cut into lines.

The data source reads larger ones, in Spark's Python processes.
"""

AHEAD = 4 * LARGEST  # stored bytes that wait in memory at most
SHARE_OF_DISK = 4  # the objects of one input may fill the free disk divided by this number
ABANDONED = 7 * 24 * 3600  # seconds after which a folder of a process on another machine counts as abandoned

EMPTY = "__NOETL_EMPTY__"
"""Replaces an empty text in partition columns during Spark's writing, which would make it null."""

_BOM = b"\xef\xbb\xbf"


class StagingStoppedError(Exception):
    """The call was cancelled during a transfer."""


class Staging:
    """One call's folder of staged files. Close it when the call's DataFrames are no longer needed.

    The folder's name identifies its process, so that folders of killed processes can be removed.

    Args:
        stopped: ends transfers once it is set, see :meth:`stop`.
        tell: receives the number of fetched objects every second.
    """

    def __init__(
        self,
        settings: Settings,
        stopped: threading.Event | None = None,
        tell: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._settings = settings
        self._stopped = stopped or threading.Event()
        self._tell = tell
        root = staging_root(settings)
        private_folder(root)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_owner()}-", dir=root))

    def close(self) -> None:
        """Stops transfers and removes the folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """Stops the transfers of other threads, which raise ``StagingStoppedError``."""
        self._stopped.set()

    def new_folder(self) -> Path:
        """Returns a new folder inside this one."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def has_room(self, parts: Sequence[StoredPart]) -> bool:
        """Reports whether the disk has room for objects; compressed ones count five times their size."""
        size = sum(part.bytes_size * (1 if part.compression == "none" else 5) for part in parts)
        return size * SHARE_OF_DISK <= shutil.disk_usage(self.folder).free

    def lines(self, parts: Sequence[StoredPart]) -> Path | None:
        """Writes elements of JSON lists and lines of texts to a single file, in order, one per line.

        Returns:
            The file; None if the objects are too large to be staged.

        Raises:
            IntegrityError: bytes differ from those that were stored; names the object.
            ReferenceNotAvailableError: nothing is stored there.
        """
        if any(part.bytes_size > LARGEST for part in parts) or not self.has_room(parts):
            return None
        path = self.new_folder() / "values.txt"
        reported = time.monotonic()
        fetched = read_ahead(self._settings, parts, most=2 * AT_ONCE, most_bytes=AHEAD)
        with path.open("wb") as file, closing(fetched):
            for number, (part, stored) in enumerate(fetched):
                self._raise_if_stopped()
                assert stored is not None
                if time.monotonic() - reported >= 1:
                    reported = time.monotonic()
                    self._tell(f"spark input: {number}/{len(parts)} objects fetched")
                text = lines_of(part, stored)
                # Hadoop drops a byte order mark at the beginning of a file; this one is part of the first value
                file.write(_BOM + text if file.tell() == 0 and text.startswith(_BOM) else text)
        return path

    def files(self, parts: Sequence[StoredPart]) -> Path | None:
        """Copies a dataset's files to a folder, under the same relative names.

        Returns:
            The folder; None if there is no room, or if a folder's name means an empty text, which the JVM's reader
            cannot represent.
        """
        names = [part.uri.removeprefix(part.base).strip("/") for part in parts]
        if any(folder.endswith("=") for name in names for folder in name.split("/")[:-1]):
            return None
        if not self.has_room(parts):
            return None
        folder = self.new_folder()

        def fetch(part: StoredPart, name: str) -> None:
            self._raise_if_stopped()
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            locations.copy_to_file(self._settings, part.uri, path, sha256=part.sha256)

        self._all(fetch, parts, names)
        return folder

    def publish(self, folder: Path, uri: str) -> dict[str, str]:
        """Copies the files that Spark wrote below a folder to a new folder URI.

        Returns:
            The sha256 of each, by its name below the URI: ``facility_id=F001/part-00000-....parquet``.
        """
        base = uri.rstrip("/")
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] not in "_.")
        names = []
        for path in paths:  # Spark escapes fewer characters in folders than the data source
            *folders, file = path.relative_to(folder).parts
            names.append("/".join([*map(_published_folder, folders), file]))

        def store(path: Path, name: str) -> str:
            self._raise_if_stopped()
            return locations.copy_from_file(self._settings, path, f"{base}/{name}")

        digests = self._all(store, paths, names)
        self._raise_if_stopped()
        return dict(zip(names, digests, strict=True))

    def _all(self, work: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Calls ``work`` for each row on a few threads; skips the rest after a failure."""
        threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="noetl-staging")
        try:
            return list(threads.map(work, *columns))
        finally:
            threads.shutdown(cancel_futures=True)

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise StagingStoppedError


def staging_for(
    session: SparkSession,
    settings: Settings,
    stopped: threading.Event | None = None,
    tell: Callable[[str], None] = lambda message: None,
) -> Staging | None:
    """Returns a folder for one call if Spark's tasks run in this process's JVM; None otherwise or if disabled."""
    if not settings.spark_staging or not hasattr(session, "_jsparkSession"):
        return None
    master = session.sparkContext.master
    is_here = master == "local" or master.startswith("local[")
    return Staging(settings, stopped, tell) if is_here else None


def staging_root(settings: Settings) -> Path:
    """Returns the folder of all calls' folders on this machine."""
    return settings.home.absolute() / "spark" / "staging"


def sweep(settings: Settings) -> None:
    """Removes the folders of processes that were killed."""
    with suppress(OSError):
        for folder in staging_root(settings).iterdir():
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _owner() -> str:
    """Returns machine, process id and the process's start, which distinguishes it from a later one of the same id."""
    return f"{socket.gethostname()}~{os.getpid()}~{psutil.Process().create_time():.2f}"


def _is_abandoned(folder: Path) -> bool:
    try:
        host, pid, rest = folder.name.rsplit("~", 2)
        created = float(rest.partition("-")[0])
        if host != socket.gethostname():
            return time.time() - folder.stat().st_mtime > ABANDONED
        return bool(abs(psutil.Process(int(pid)).create_time() - created) > 1)
    except psutil.NoSuchProcess:
        return True
    except (ValueError, OSError, psutil.Error):
        return False


def _published_folder(folder: str) -> str:
    name, equals, value = folder.partition("=")
    text = unquote(value)
    return f"{unquote(name)}{equals}{'' if text == EMPTY else quote(text, safe='')}"
