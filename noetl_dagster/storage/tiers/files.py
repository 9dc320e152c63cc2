"""Tiers ``pvc`` and ``disk``: files below one folder.

A file appears under its name only when it is complete and on the disk: written to a temporary name,
``fsync``, renamed, and the folder ``fsync``-ed. Readers on other machines of a shared volume therefore see
a whole file or none. No path leaves the mount, neither by ``..`` nor through a symbolic link.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from noetl_dagster.errors import StorageError
from noetl_dagster.storage.tiers.base import CHUNK, Bytes, TierUnavailableError


def path_of_uri(uri: str) -> Path:
    """The path of a ``file://`` URI; a plain absolute path is one already."""
    if uri.startswith("/"):
        return Path(uri)
    parts = urlsplit(uri)
    if parts.scheme != "file":
        raise StorageError(f"{uri} is not a file; expected file:///... or an absolute path")
    return Path(unquote(parts.path))


def confined(root: Path, path: Path) -> Path:
    """``path`` when it lies below ``root`` after every symbolic link is followed.

    Raises:
        StorageError: when it does not; names the path and the mount.
    """
    if ".." not in path.parts:
        resolved = path.resolve()
        if resolved.is_relative_to(root.resolve()):
            return resolved
    raise StorageError(f"{path} leaves the mount {root}; results are read and written below it only")


class FileTier:
    """Objects as files below ``root``. ``make_root`` creates the folder; a mount must be there already."""

    def __init__(self, root: Path, *, name: str, make_root: bool) -> None:
        self._root = root.absolute()
        self._name = name
        self._make_root = make_root

    def uri(self, key: str) -> str:
        return (self._root / key).as_uri()

    async def ready(self) -> None:
        await asyncio.to_thread(self._check_root)

    async def put(self, key: str, data: Bytes) -> str:
        def write(descriptor: int) -> None:
            _write_all(descriptor, data)

        return await asyncio.to_thread(self._write_whole, key, write)

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        path = await asyncio.to_thread(self._prepare, key)
        temporary = _temporary(path)
        descriptor = await asyncio.to_thread(os.open, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            async for chunk in chunks:
                await asyncio.to_thread(_write_all, descriptor, chunk)
            await asyncio.to_thread(os.fsync, descriptor)
            await asyncio.to_thread(_publish, temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                temporary.unlink()
            raise
        finally:
            os.close(descriptor)
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        path = self.path(uri)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise KeyError(uri) from error
        except OSError as error:
            raise StorageError(f"{self._name} tier: cannot read {path}: {error}") from error

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        path = self.path(uri)
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise KeyError(uri) from error
        with file:
            chunk = await asyncio.to_thread(file.read, CHUNK)
            while chunk:
                ahead = asyncio.ensure_future(asyncio.to_thread(file.read, CHUNK))
                try:
                    yield chunk
                finally:
                    chunk = await ahead  # the file must not be closed under a thread that reads it

    async def exists(self, uri: str) -> bool:
        return await asyncio.to_thread(self.path(uri).exists)

    async def delete(self, uri: str) -> None:
        await asyncio.to_thread(self._delete, self.path(uri))

    async def close(self) -> None:
        return None

    def path(self, uri: str) -> Path:
        """The file of a URI, inside the mount."""
        return confined(self._root, path_of_uri(uri))

    def _check_root(self) -> None:
        if self._make_root:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TierUnavailableError(
                    f"{self._name} tier: cannot create {self._root}: {error}"
                ) from error
        elif not self._root.is_dir():
            raise TierUnavailableError(
                f"{self._name} tier: {self._root} is not mounted; mount it or set NOETL_PVC_MOUNT_PATH"
            )

    def _prepare(self, key: str) -> Path:
        self._check_root()
        path = self._root / key
        confined(self._root, path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self._name} tier: cannot create {path.parent}: {error}") from error
        return confined(self._root, path)

    def _write_whole(self, key: str, write: Callable[[int], None]) -> str:
        path = self._prepare(key)
        temporary = _temporary(path)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                write(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _publish(temporary, path)
        except OSError as error:
            raise StorageError(f"{self._name} tier: cannot write {path}: {error}") from error
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        return self.uri(key)

    def _delete(self, path: Path) -> None:
        if path == self._root.resolve():
            raise StorageError(f"{self._name} tier: refusing to delete the whole mount {self._root}")
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")


def _write_all(descriptor: int, data: Bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _publish(temporary: Path, path: Path) -> None:
    """Gives a finished file its name; the folder is synced so that the name survives a power cut."""
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
