"""A folder of files as one source, such as a transfer or Spark has written."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.transfer.chunks import Chunk
from noetl_dagster.tools.transfer.places import Place, data_files, open_folder
from noetl_dagster.tools.transfer.sources.files import FileSource


class FolderSource:
    """The files of a folder one after another, by name; those whose names begin with ``_`` or ``.`` are none."""

    seeks = True

    def __init__(self, files: list[FileSource], identity: str) -> None:
        self._files, self._identity = files, identity
        self.bytes = sum(file.bytes for file in files)

    @classmethod
    async def of(cls, place: Place, call: ToolCall, box: Toolbox, size: int) -> FolderSource:
        """Raises ``ToolError`` where there is no such folder, or its files lie in folders below it."""
        folder = await open_folder(place, call, box)
        names, below = await data_files(folder)
        if below:
            raise ToolError(
                f"transfer in step {call.step}: source.path: {place.path} has folders, such as {below[0]}; a folder's "
                "own files are read: name one of them, or read all with a query of kind duckdb",
                kind="schema",
            )
        paths = [place.model_copy(update={"path": place.path + name}) for name in names]
        files = [await FileSource.of(path, call, box, size) for path in paths]
        known = [f"{name}:{await file.identity()}" for name, file in zip(names, files, strict=True)]
        return cls(files, hashlib.blake2b("\n".join(known).encode(), digest_size=16).hexdigest())

    async def identity(self) -> str:
        return self._identity

    async def chunks(self, after: Any = None) -> AsyncIterator[Chunk]:
        first, inner = (after["file"], after["after"]) if after is not None else (0, None)
        for number in range(first, len(self._files)):
            async for chunk in self._files[number].chunks(inner):
                there = None if chunk.after is None else {"file": number, "after": chunk.after}
                yield Chunk(chunk.data, there)
            inner = None
