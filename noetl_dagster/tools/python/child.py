"""The child process of ``isolation: subprocess``: reads a request, runs it, writes the answer.

In the folder given as argument: ``request.json`` in; ``result.json`` (``{value}`` or ``{failure}``) or
``result.arrow`` out.
"""

from __future__ import annotations

import asyncio
import inspect
import resource
import sys
from pathlib import Path
from typing import Any

import orjson

from noetl_dagster.tools.python.code import (
    FAILURES,
    CodeFailure,
    compile_code,
    failure_of,
    finished,
    run_program,
)
from noetl_dagster.tools.python.context import CodeContext
from noetl_dagster.tools.rows.jsonable import is_table

REQUEST, RESULT, TABLE = "request.json", "result.json", "result.arrow"


def answer(request: dict[str, Any]) -> Any:
    """The value of the requested code.

    Raises:
        CodeFailure: the code failed.
    """
    program = compile_code(request["source"], request["name"])
    value = run_program(
        program,
        request["input"],
        request["scope"],
        libs=request["libs"],
        context=lambda: CodeContext.ported(request["context"]),
        rendered=request["rendered"],
    )
    if inspect.iscoroutine(value):
        try:
            value = asyncio.run(value)
        except FAILURES as error:
            raise failure_of(error, program) from None
    return finished(value, program)


def main(folder: Path) -> None:
    request = orjson.loads((folder / REQUEST).read_bytes())
    if request["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
    try:
        value = answer(request)
        if is_table(value):
            return _write_table(value, folder / TABLE)
        reply: dict[str, Any] = {"value": value}
    except CodeFailure as failure:
        reply = {
            "failure": {
                "exception_type": failure.exception_type,
                "message": failure.message,
                "line": failure.line,
                "function": failure.function,
                "transient": failure.transient,
            }
        }
    (folder / RESULT).write_bytes(orjson.dumps(reply))
    return None


def _write_table(value: Any, path: Path) -> None:
    import pyarrow as pa

    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    table = value if isinstance(value, pa.Table) else pa.Table.from_pandas(value, preserve_index=False)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
