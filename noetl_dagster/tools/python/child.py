"""The child process of ``isolation: subprocess``: reads a request, runs it, writes the response.

The folder in the argument contains ``request.json``. The child writes ``result.json`` (``{value}`` or ``{failure}``)
or ``result.arrow``. Yielded rows are files too; the child announces each in a line on the channel and reads a reply.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import orjson

from noetl_dagster.process.confining import enter
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.python.code import (
    NO_POSITION,
    CodeFailure,
    FailureOf,
    arrow_table,
    async_chunks_of,
    chunks_of,
    compile_code,
    finished,
    run_program,
)
from noetl_dagster.tools.python.context import CodeContext
from noetl_dagster.values import RefusedValueError, is_table, legible

REQUEST, RESULT, TABLE = "request.json", "result.json", "result.arrow"
MORE, ENOUGH = b"more\n", b"enough\n"
STREAMED = object()  # the value of code whose chunks have all been passed on


class Handover:
    """Passes chunks to the parent process. Code makes the next chunk while the parent stores one, and then waits."""

    def __init__(self, folder: Path, channel: int) -> None:
        self._folder = folder
        self._channel = socket.socket(fileno=channel)
        self._channel.set_inheritable(False)
        self._answers = self._channel.makefile("rb")
        self._given = 0
        self._waits = False

    def give(self, chunk: Gathered) -> bool:
        """Passes a chunk on; False if no more are wanted. Raises ``SystemExit`` if an earlier one was not stored."""
        if not self.taken():
            return False
        self._given += 1
        name = f"chunk-{self._given}{Path(RESULT if isinstance(chunk.rows, list) else TABLE).suffix}"
        _write(chunk.rows, self._folder / name)
        message = {"file": name, "position": chunk.position, "full": chunk.full}
        self._channel.sendall(orjson.dumps(message) + b"\n")
        self._waits = True
        return True

    def taken(self) -> bool:
        """Waits until the latest chunk is stored; False if no more are wanted."""
        waits, self._waits = self._waits, False
        answer = self._answers.readline() if waits else MORE
        if not answer:
            sys.exit(1)
        return answer == MORE


def answer(request: dict[str, Any], handover: Handover) -> Any:
    """Returns the value of the requested code, ``STREAMED`` if it was passed on in chunks."""
    program = compile_code(request["source"], request["name"])
    value = run_program(
        program,
        request["input"],
        request["scope"],
        libs=request["libs"],
        context=lambda: CodeContext.ported(request["context"]),
        rendered=request["rendered"],
        position=request["position"] if request["seeks"] else NO_POSITION,
    )
    if inspect.iscoroutine(value):
        with FailureOf(program):
            value = asyncio.run(value)
    how = {"chunk_bytes": request["chunk_bytes"], "seeks": request["seeks"]}
    if inspect.isgenerator(value):
        with closing(chunks_of(value, program, **how)) as chunks:
            for chunk in chunks:
                if not handover.give(chunk):
                    break
        return STREAMED
    if inspect.isasyncgen(value):
        asyncio.run(_give_all(async_chunks_of(value, program, **how), handover))
        return STREAMED
    return finished(value, program)


async def _give_all(values: AsyncGenerator[Gathered, None], handover: Handover) -> None:
    async with aclosing(values) as chunks:
        async for chunk in chunks:
            if not handover.give(chunk):
                break


def main(folder: Path) -> None:
    """Runs the request in a folder and writes its result there."""
    request = orjson.loads((folder / REQUEST).read_bytes())
    enter(request["rules"])
    handover = Handover(folder, request["channel"])
    try:
        value = answer(request, handover)
        if is_table(value):
            return _write(value, folder / TABLE)
        reply: dict[str, Any] = {} if value is STREAMED else {"value": value}
    except CodeFailure as failure:
        reply = {"failure": legible(vars(failure))}
    except RefusedValueError as refused:
        reply = {"refused": str(refused)}
    handover.taken()  # chunks before a failure are kept
    (folder / RESULT).write_bytes(orjson.dumps(reply))
    return None


def _write(value: Any, path: Path) -> None:
    if isinstance(value, list):
        path.write_bytes(orjson.dumps(value))
        return
    import pyarrow as pa

    table = arrow_table(value)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
