"""Tiers ``pvc`` and ``disk``: files below one folder.

A file appears under its name only when it is complete and on the disk: written to a temporary name,
``fsync``, renamed, and the folder ``fsync``-ed. Readers on other machines of a shared volume therefore see
a whole file or none. No path leaves the mount, neither by ``..`` nor through a symbolic link.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from noetl_dagster.errors import StorageError
from noetl_dagster.storage.tiers.base import CHUNK, Bytes, TierUnavailableError
from noetl_dagster.storage.tiers.new_file import NewFile

_ONE_READ = 16 * 1024 * 1024
"""Files up to this size are read at once: handing pieces from thread to thread costs more than it gains."""


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
        return await asyncio.to_thread(self._write_whole, key, data)

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Each chunk is written while the next one is made."""
        file = await asyncio.to_thread(self._create, key)
        step: asyncio.Task[None] | None = None
        try:
            async for chunk in chunks:
                if step is not None:
                    await asyncio.shield(step)
                step = asyncio.create_task(asyncio.to_thread(self._write, file, chunk))
            if step is not None:
                await asyncio.shield(step)
            step = asyncio.create_task(asyncio.to_thread(self._publish, file))
            await asyncio.shield(step)
        except BaseException:
            if step is not None:  # the file must not be closed under a thread that writes it
                await asyncio.gather(step, return_exceptions=True)
            await asyncio.to_thread(file.discard)
            raise
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
            size = os.fstat(file.fileno()).st_size
            take = size if size <= _ONE_READ else CHUNK
            chunk = await asyncio.to_thread(file.read, take)
            while chunk:
                ahead = asyncio.ensure_future(asyncio.to_thread(file.read, take))
                try:
                    yield chunk
                finally:
                    chunk = await ahead  # the file must not be closed under a thread that reads it

    async def exists(self, uri: str) -> bool:
        return await asyncio.to_thread(self.path(uri).exists)

    async def delete(self, uri: str) -> None:
        await asyncio.to_thread(self._delete, self.path(uri))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        folders = os.walk(self._root / prefix)
        while (found := await asyncio.to_thread(next, folders, None)) is not None:
            folder, _, names = found
            yield [Path(folder, name).relative_to(self._root).as_posix() for name in names]

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

    def _create(self, key: str) -> NewFile:
        path = self._prepare(key)
        with self._write_errors(path):
            return NewFile(path)

    def _write(self, file: NewFile, data: Bytes) -> None:
        with self._write_errors(file.path):
            file.write(data)

    def _publish(self, file: NewFile) -> None:
        with self._write_errors(file.path):
            file.publish()

    def _write_whole(self, key: str, data: Bytes) -> str:
        file = self._create(key)
        try:
            self._write(file, data)
            self._publish(file)
        except BaseException:
            file.discard()
            raise
        return self.uri(key)

    @contextmanager
    def _write_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self._name} tier: cannot write {path}: {error}") from error

    def _delete(self, path: Path) -> None:
        if path == self._root.resolve():
            raise StorageError(f"{self._name} tier: refusing to delete the whole mount {self._root}")
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
