"""Tiers ``pvc`` and ``disk``: files below one folder.

A file appears under its name only when it is complete and on the disk: written to a temporary name,
``fsync``, renamed, and the folder ``fsync``-ed. Readers on other machines of a shared volume therefore see
a whole file or none. No path leaves the mount, neither by ``..`` nor through a symbolic link. Only one user
may read the files and folders, so all processes that share a volume have the same user id.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from noetl_dagster.errors import StorageError
from noetl_dagster.private_files import private_file, private_folder
from noetl_dagster.storage.tiers.base import CHUNK, Bytes, Tier, TierUnavailableError

_ONE_READ = 16 * 1024 * 1024
"""Files up to this size are read at once: passing pieces between threads would cost more than it saves."""

_ONE_WRITE = 16 * 1024 * 1024


def path_of_uri(uri: str) -> Path:
    """Returns the path of a ``file://`` URI or of a plain absolute path."""
    if uri.startswith("/"):
        return Path(uri)
    parts = urlsplit(uri)
    if parts.scheme != "file":
        raise StorageError(f"{uri} is not a file; expected file:///... or an absolute path")
    return Path(unquote(parts.path))


def below(root: Path, path: Path) -> Path | None:
    """Returns ``path`` with every symbolic link followed if it lies below ``root``, else None."""
    if ".." in path.parts or not (resolved := path.resolve()).is_relative_to(root.resolve()):
        return None
    return resolved


def confined(root: Path, path: Path) -> Path:
    """Returns ``path`` as :func:`below`; raises ``StorageError`` if it does not lie below ``root``."""
    resolved = below(root, path)
    if resolved is None:
        raise StorageError(f"{path} leaves the mount {root}; results are read and written below it only")
    return resolved


class FileTier(Tier):
    """Objects as files below ``root``. ``make_root`` creates the folder; a mount must already exist."""

    def __init__(self, root: Path, *, name: str, make_root: bool) -> None:
        self._root = root.absolute()
        self._name = name
        self._make_root = make_root

    def uri(self, key: str) -> str:
        """Returns the URI of an object stored under ``key``."""
        return (self._root / key).as_uri()

    async def ready(self) -> None:
        """Returns when the store answers."""
        await asyncio.to_thread(self._check_root)

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""
        return await asyncio.to_thread(self._put, key, data)

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Writes each chunk while the next one is produced; if ``chunks`` raises, nothing is left."""
        file = await asyncio.to_thread(self._create, key)
        step: asyncio.Task[None] | None = None
        try:
            async for chunk in chunks:
                if step is not None:
                    await asyncio.shield(step)
                step = asyncio.create_task(asyncio.to_thread(file.write, chunk))
            if step is not None:
                await asyncio.shield(step)
            step = asyncio.create_task(asyncio.to_thread(file.publish))
            await asyncio.shield(step)
        except BaseException:
            if step is not None:  # the file must not be closed under a thread that writes it
                await asyncio.gather(step, return_exceptions=True)
            await asyncio.to_thread(file.close)
            raise
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        path = self._path(uri)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise KeyError(uri) from error
        except OSError as error:
            raise StorageError(f"{self._name} tier: cannot read {path}: {error}") from error

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the bytes of an object in order, in constant memory."""
        path = self._path(uri)
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

    async def size(self, uri: str) -> int:
        """Returns the number of bytes of an object."""
        try:
            return (await asyncio.to_thread(self._path(uri).stat)).st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise KeyError(uri) from error
        except OSError as error:
            raise StorageError(f"{self._name} tier: cannot read {uri}: {error}") from error

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error."""
        await asyncio.to_thread(self._delete, self._path(uri))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        folders = os.walk(self._root / prefix)
        while (entry := await asyncio.to_thread(next, folders, None)) is not None:
            folder, _, names = entry
            yield [Path(folder, name).relative_to(self._root).as_posix() for name in names]

    def _path(self, uri: str) -> Path:
        return confined(self._root, path_of_uri(uri))

    def _check_root(self) -> None:
        if self._make_root:
            try:
                private_folder(self._root)
            except OSError as error:
                raise TierUnavailableError(f"{self._name} tier: cannot create {self._root}: {error}") from error
        elif not self._root.is_dir():
            raise TierUnavailableError(
                f"{self._name} tier: {self._root} is not mounted; mount it or set NOETL_PVC_MOUNT_PATH"
            )

    def _create(self, key: str) -> NewFile:
        self._check_root()
        path = self._root / key
        confined(self._root, path)
        try:
            private_folder(path.parent)
        except OSError as error:
            raise StorageError(f"{self._name} tier: cannot create {path.parent}: {error}") from error
        return NewFile(confined(self._root, path), self._name)

    def _put(self, key: str, data: Bytes) -> str:
        file = self._create(key)
        try:
            file.write(data)
            file.publish()
        except BaseException:
            file.close()
            raise
        return self.uri(key)

    def _delete(self, path: Path) -> None:
        if path == self._root.resolve():
            raise StorageError(f"{self._name} tier: refusing to delete the whole mount {self._root}")
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class NewFile:
    """A file that is written under a temporary name, synced and renamed. Every method blocks: call it in a thread."""

    def __init__(self, path: Path, tier: str) -> None:
        self._path = path
        self._tier = tier
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        with self._errors():
            self._descriptor = private_file(str(self._temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, data: Bytes) -> None:
        """Appends bytes."""
        view = memoryview(data)
        with self._errors():
            while view:
                view = view[os.write(self._descriptor, view[:_ONE_WRITE]) :]

    def publish(self) -> None:
        """Renames the finished file; the folder is synced so that the name survives a power cut."""
        with self._errors():
            os.fsync(self._descriptor)
            self._close_descriptor()
            self._temporary.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Removes an unfinished file; harmless after :meth:`publish`."""
        self._close_descriptor()
        with suppress(FileNotFoundError):
            self._temporary.unlink()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self._tier} tier: cannot write {self._path}: {error}") from error

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
