"""``isolation: subprocess``: playbook code in a separate interpreter, with a memory limit."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.process.environment import playbook_environment
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import ToolResult
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.commands.processes import Finished, run_process
from noetl_dagster.tools.python.child import ENOUGH, MORE, REQUEST, RESULT, STREAMED, TABLE
from noetl_dagster.tools.python.code import CodeFailure, Printed
from noetl_dagster.tools.rows.jsonable import NotJsonableError, to_jsonable

CHILD = "noetl_dagster.tools.python.child"
POSITION_BYTES = 1 << 20  # of a position, as JSON, that a child may yield, at most

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", re.IGNORECASE)


async def run_in_process(
    request: Mapping[str, Any], printer: Printed, chunks: ChunkedResult, settings: Settings
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
    with tempfile.TemporaryDirectory(prefix="noetl-python-") as name, ours, theirs:
        folder, content = Path(name), orjson.dumps({**request, "channel": theirs.fileno()})
        await asyncio.to_thread((folder / REQUEST).write_bytes, content)
        receiving = asyncio.ensure_future(_receive(ours, folder, chunks))
        try:
            finished = await run_process(
                [sys.executable, "-m", CHILD, name],
                env=playbook_environment(settings),
                pass_fds=[theirs.fileno()],
            )
        finally:
            receiving.cancel()
            (failure,) = await asyncio.gather(receiving, return_exceptions=True)
        for line in finished.stdout.splitlines():
            printer(line)
        if isinstance(failure, Exception):
            raise failure
        value = _answer(folder, finished)
        return await chunks.result() if value is STREAMED else ToolResult(data=value)


async def _receive(channel: socket.socket, folder: Path, chunks: ChunkedResult) -> None:
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


def _chunk(folder: Path, message: dict[str, Any]) -> Gathered:
    path = folder / message["file"]
    rows = _table(path) if path.suffix == Path(TABLE).suffix else orjson.loads(path.read_bytes())
    path.unlink()
    return Gathered(rows, message["position"], message["full"])


def _table(path: Path) -> pa.Table:
    with pa.ipc.open_file(path) as reader:
        return reader.read_all()


def _answer(folder: Path, finished: Finished) -> Any:
    if (folder / TABLE).exists():
        return _table(folder / TABLE)
    if (folder / RESULT).exists():
        answer = orjson.loads((folder / RESULT).read_bytes())
        if "failure" in answer:
            raise CodeFailure(**answer["failure"])
        return answer.get("value", STREAMED)
    stderr, code = finished.stderr.strip()[-500:], finished.exit_code
    if "MemoryError" in stderr or "bad_alloc" in stderr:
        raise CodeFailure("MemoryError", "the code needs more memory than its limit", None)
    if code < 0:
        raise CodeFailure("Killed", f"the process was killed by signal {-code}", None)
    raise CodeFailure("Exited", f"the process ended with exit code {code}: {stderr}", None)


def portable(values: Mapping[str, Any], what: str) -> Any:
    """Returns values as JSON values, since another process reads them. Raises ``ToolError`` if one has no such form."""
    try:
        return to_jsonable(dict(values), what)
    except NotJsonableError as error:
        raise ToolError(f"{error}; a subprocess is given JSON values only", kind="transform") from None


def bytes_of(size: Any) -> int:
    """Returns the bytes of ``1048576``, ``512m``, ``1.5 GiB``.

    Pydantic's ``ByteSize`` reads ``512m`` as 512 million, but memory is counted as containers count it.
    """
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ToolError(f"memory {size!r} is no size; write bytes, or 512m, 2g", kind="schema")
    return int(float(match[1]) * _UNITS[match[2].lower()])
