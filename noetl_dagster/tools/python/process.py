"""``isolation: subprocess``: playbook code in an interpreter of its own, with a bound on memory."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.commands.processes import Finished, run_process
from noetl_dagster.tools.python.child import REQUEST, RESULT, TABLE
from noetl_dagster.tools.python.code import CodeFailure, Printed
from noetl_dagster.tools.rows.jsonable import NotJsonableError, to_jsonable

CHILD = "noetl_dagster.tools.python.child"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", re.IGNORECASE)


async def run_in_process(
    source: str,
    name: str,
    *,
    input: Mapping[str, Any],
    scope: Mapping[str, Any],
    context: Mapping[str, Any] | None,
    rendered: Mapping[str, Any],
    libs: Any,
    memory: Any,
    printer: Printed,
) -> Any:
    """Runs code in a child process and gives its value; the child is killed when the caller is cancelled.

    Args:
        input, scope: as JSON values, since they travel to another process.
        context: what ``CodeContext.portable`` gave, where the code asks for it.
        rendered: the values of the code's templates.
        memory: bound of the child's address space in bytes, or text such as ``512m``; None: no bound.

    Raises:
        CodeFailure: the code failed, or the process was killed (``MemoryError`` where memory ran out).
        ToolError: the input has no JSON form, or ``memory`` is no size.
    """
    request = {
        "source": source,
        "name": name,
        "input": _portable(input, "input"),
        "scope": _portable(scope, "context"),
        "context": None if context is None else _portable(context, "context"),
        "rendered": rendered,
        "libs": libs,
        "memory": None if memory is None else bytes_of(memory),
    }
    with tempfile.TemporaryDirectory(prefix="noetl-python-") as folder:
        path = Path(folder, REQUEST)
        await asyncio.to_thread(path.write_bytes, orjson.dumps(request))
        finished = await run_process([sys.executable, "-m", CHILD, folder])
        for line in finished.stdout.splitlines():
            printer(line)
        return _answer(Path(folder), finished)


def _answer(folder: Path, finished: Finished) -> Any:
    if (folder / TABLE).exists():
        with pa.ipc.open_file(folder / TABLE) as reader:
            return reader.read_all()
    if not (folder / RESULT).exists():
        raise _death(finished)
    answer = orjson.loads((folder / RESULT).read_bytes())
    if "failure" in answer:
        raise CodeFailure(**answer["failure"])
    return answer["value"]


def _death(finished: Finished) -> CodeFailure:
    said = finished.stderr.strip()[-500:]
    if "MemoryError" in said or "bad_alloc" in said:
        return CodeFailure("MemoryError", "the code needs more memory than its limit", None)
    if finished.exit_code < 0:
        return CodeFailure("Killed", f"the process was killed by signal {-finished.exit_code}", None)
    return CodeFailure("Exited", f"the process ended with exit code {finished.exit_code}: {said}", None)


def _portable(values: Mapping[str, Any], what: str) -> Any:
    try:
        return to_jsonable(dict(values), what)
    except NotJsonableError as error:
        raise ToolError(f"{error}; a subprocess is given JSON values only", kind="transform") from None


def bytes_of(size: Any) -> int:
    """Bytes of ``1048576``, ``512m``, ``1.5 GiB``.

    Not pydantic's ``ByteSize``, which takes ``512m`` for 512 million: memory is counted as containers count it.

    Raises:
        ToolError: for anything else.
    """
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ToolError(f"memory {size!r} is no size; write bytes, or 512m, 2g", kind="schema")
    return int(float(match[1]) * _UNITS[match[2].lower()])
