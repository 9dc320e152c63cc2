"""``isolation: subprocess``: playbook code in a separate interpreter, with a memory limit."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.process.environment import playbook_environment
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import ToolResult
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.commands.processes import Confinement, ProcessRun, run_process
from noetl_dagster.tools.python.child import ENOUGH, MORE, REQUEST, RESULT, STREAMED, TABLE
from noetl_dagster.tools.python.code import CodeFailure, Printed
from noetl_dagster.values import RefusedValueError

CHILD = "noetl_dagster.tools.python.child"
POSITION_BYTES = 1 << 20  # of a position, as JSON, that a child may yield, at most

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", re.IGNORECASE)


async def run_in_process(
    request: Mapping[str, Any], printer: Printed, chunks: ChunkedResult, settings: Settings, confined: Confinement
) -> ToolResult:
    """Runs code in a child process and returns its value; the child is killed if the caller is cancelled.

    Args:
        request: JSON values, as :func:`noetl_dagster.tools.python.child.answer` reads them.

    Raises:
        CodeFailure: the code failed, or the process was killed (``MemoryError`` if memory ran out).
        ToolError: a chunk differs from the stored one.
        StorageError: a chunk could not be stored.
    """
    ours, theirs = socket.socketpair()
    with confined.private_folder("noetl-python-") as path, ours, theirs, _ChildFolder(path) as folder:
        content = orjson.dumps({**request, "channel": theirs.fileno(), "rules": confined.rules()})
        await asyncio.to_thread((path / REQUEST).write_bytes, content)
        receiving = asyncio.ensure_future(_receive(ours, folder, chunks))
        try:
            finished = await run_process(
                [sys.executable, "-m", CHILD, str(path)],
                env={**playbook_environment(settings), **confined.variables(path)},
                pass_fds=[theirs.fileno()],
            )
        finally:
            receiving.cancel()
            (failure,) = await asyncio.gather(receiving, return_exceptions=True)
        for line in str(finished.stdout).splitlines():
            printer(line)
        if isinstance(failure, Exception):
            raise failure
        value = _answer(folder, finished)
        return await chunks.result() if value is STREAMED else ToolResult(data=value, admitted=True)


class _ChildFolder:
    """The folder that a child process writes its results to.

    The child may not let this process read or remove other files in its place, so links and paths are refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _ChildFolder:
        self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the child may move it
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._folder)

    def open(self, name: str) -> IO[bytes] | None:
        """Opens a file; None if there is none. Raises ``CodeFailure`` for everything that is no file of the folder."""
        how = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            opened = os.open(self._plain(name), how, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CodeFailure("OSError", f"{name} of the subprocess cannot be read: {error.strerror}", None) from None
        facts = os.fstat(opened)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            os.close(opened)
            raise CodeFailure("OSError", f"{name} of the subprocess is no file of its own", None)
        return os.fdopen(opened, "rb")

    def take(self, name: str) -> Any:
        """Reads and removes a list or a table; None if there is none."""
        if (file := self.open(name)) is None:
            return None
        with file:
            value = _table(file) if Path(name).suffix == Path(TABLE).suffix else orjson.loads(file.read())
        os.unlink(self._plain(name), dir_fd=self._folder)
        return value

    @staticmethod
    def _plain(name: str) -> str:
        if os.sep in name:
            raise CodeFailure("OSError", f"{name!r} is no file of the subprocess", None)
        return name


async def _receive(channel: socket.socket, folder: _ChildFolder, chunks: ChunkedResult) -> None:
    """Stores the chunks that the child writes, and replies to each whether more are wanted.

    If one cannot be stored, the channel is closed, which ends the child.
    """
    reader, writer = await asyncio.open_connection(sock=channel, limit=POSITION_BYTES)
    try:
        while message := await reader.readline():
            more = await chunks.put(await asyncio.to_thread(_chunk, folder, orjson.loads(message)))
            writer.write(MORE if more else ENOUGH)
    finally:
        writer.close()


def _chunk(folder: _ChildFolder, message: dict[str, Any]) -> Gathered:
    return Gathered(folder.take(str(message["file"])), message["position"], message["full"])


def _table(file: IO[bytes]) -> pa.Table:
    with pa.ipc.open_file(file) as reader:
        return reader.read_all()


def _answer(folder: _ChildFolder, finished: ProcessRun) -> Any:
    if (table := folder.take(TABLE)) is not None:
        return table
    if (answer := folder.take(RESULT)) is not None:
        if "failure" in answer:
            raise CodeFailure(**answer["failure"])
        if "refused" in answer:
            raise RefusedValueError(*answer["refused"].split(" ", 1))
        return answer.get("value", STREAMED)
    stderr, code = SECRETS.redact(str(finished.stderr).strip())[-500:], finished.exit_code
    if "MemoryError" in stderr or "bad_alloc" in stderr:
        raise CodeFailure("MemoryError", "the code needs more memory than its limit", None)
    if code < 0:
        raise CodeFailure("Killed", f"the process was killed by signal {-code}", None)
    raise CodeFailure("Exited", f"the process ended with exit code {code}: {stderr}", None)


def bytes_of(size: Any) -> int:
    """Returns the bytes of ``1048576``, ``512m``, ``1.5 GiB``.

    Pydantic's ``ByteSize`` reads ``512m`` as 512 million, but memory is counted as containers count it.
    """
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ToolError(f"memory {size!r} is no size; write bytes, or 512m, 2g", kind="schema")
    return int(float(match[1]) * _UNITS[match[2].lower()])
