"""A file that appears under its name only when it is complete and on the disk."""

from __future__ import annotations

import ctypes
import os
import secrets
from contextlib import suppress
from pathlib import Path

from noetl_dagster.storage.tiers.base import Bytes

_WRITE_OUT = 16 * 1024 * 1024
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


class NewFile:
    """Written to a temporary name, synced, renamed. Every method blocks and belongs in a thread.

    The kernel is asked to write each block out while later ones are still coming; the sync at the end, which
    is what makes the file durable, then finds little left to do. Asking is all: unlike a sync in between it
    commits no journal, and makes a mounted bucket (gcsfuse) upload nothing early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._written = 0
        self._asked_for = 0

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        while view:
            count = os.write(self._descriptor, view[:_WRITE_OUT])
            view = view[count:]
            self._written += count
            if self._written - self._asked_for >= _WRITE_OUT:
                self._write_out()

    def publish(self) -> None:
        """Gives the finished file its name; the folder is synced so that the name survives a power cut."""
        os.fsync(self._descriptor)
        self._close()
        self._temporary.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Leaves nothing; harmless after :meth:`publish`."""
        self._close()
        with suppress(FileNotFoundError):
            self._temporary.unlink()

    def _write_out(self) -> None:
        if _sync_file_range is not None:  # Linux only, and a hint: what it cannot do, the sync does
            length = self._written - self._asked_for
            offset, size = ctypes.c_int64(self._asked_for), ctypes.c_int64(length)
            _sync_file_range(self._descriptor, offset, size, _SYNC_FILE_RANGE_WRITE)
        self._asked_for = self._written

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
