"""``kind: python``: code of the playbook, in a thread of this process or in a separate process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import orjson

from noetl_dagster.errors import TemplateError, ToolError
from noetl_dagster.playbook.models import Task
from noetl_dagster.playbook.templates.rendering import ENDS_IN_TOJSON, compile_value, render_async
from noetl_dagster.settings import PythonIsolation
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult, time_limit
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.commands.processes import confinement
from noetl_dagster.tools.files import load_script
from noetl_dagster.tools.python.code import (
    NO_POSITION,
    NO_VALUES,
    POSITION,
    CodeFailure,
    FailureOf,
    Printed,
    Program,
    async_chunks_of,
    chunks_of,
    compile_code,
    finished,
    run_program,
)
from noetl_dagster.tools.python.context import LiveScope
from noetl_dagster.tools.python.threads import CodeThreads
from noetl_dagster.values import RefusedValueError, admit


class PythonTool(Tool):
    """Runs code; its value is that of a top-level ``return``, of ``main(...)``, or of the variable ``result``.

    Input: ``code`` or ``script``; ``input``, whose keys are variables of the code and arguments of ``main``
    (further arguments come from the iterator and the context); ``libs``. Both have ``context``, the names of
    templates, ``input_data``, the whole input, and ``execution_id``. A ``{{ template }}`` outside of string literals is
    replaced by its value. The code gets copies, so its changes have no effect elsewhere.
    ``spec.isolation: subprocess`` runs the code in a separate process, killed at ``spec.timeout``, with
    ``spec.memory`` (bytes, or text such as ``512m``) as the limit of its address space. ``NOETL_PYTHON_ISOLATION`` is
    the default, and ``NOETL_PLAYBOOK_*`` limit such processes.

    A generator (``main`` yields, or the code itself, or ``result`` is one; async or not) yields rows: a list or table
    is several, anything else is one. They are passed on in chunks. If it reads ``position`` and yields pairs
    ``rows, position``, it resumes there after a restart; any other runs again, and must yield the same rows.

    Output: the value in its stored form, an Arrow table for any table; of a generator all its rows, by reference if
    they are more than a chunk or a step consumes chunks. ``print`` writes to the logger
    ``noetl_dagster.tools.python.output``.

    Raises ``ToolError`` of kind ``python`` with ``py.exception_type`` and the line in the playbook.
    """

    def __init__(self) -> None:
        self._threads = CodeThreads()
        self._coroutines = _CoroutineLoop()

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the code and returns its value."""
        source = await load_script(call, context) if "script" in call.config else call.config.get("code")
        if not isinstance(source, str) or not source.strip():
            raise ToolError(f"python in step {call.step} has no 'code'", kind="schema")
        try:
            isolation = _option(call, "isolation") or context.settings.python_isolation
            in_subprocess = isolation == PythonIsolation.SUBPROCESS
            most = context.settings.playbook_seconds if in_subprocess else None
            async with time_limit(call, most):
                return await self._run(source, call, context, in_subprocess)
        except CodeFailure as failure:
            raise _tool_error(failure, call, source) from None

    async def _run(self, source: str, call: ToolCall, context: ToolContext, in_subprocess: bool) -> ToolResult:
        program = compile_code(source, f"{call.step}.{call.task.name}")
        rendered = await rendered_templates(program, source, call, context)
        chunks = ChunkedResult(call, context)
        seeks = program.seeks and POSITION not in call.input and POSITION not in call.scope
        if seeks and not await chunks.seek():
            return await chunks.result()
        run = _PythonRun(call, context, program, rendered, chunks, chunks.position if seeks else NO_POSITION)
        if in_subprocess:
            return await self._in_subprocess(source, run)
        try:
            return await self._in_thread(run)
        finally:
            run.close()

    async def _in_thread(self, run: _PythonRun) -> ToolResult:
        value = await self._threads.run(run.code)
        if inspect.iscoroutine(value):
            value = await self._coroutines.run(run.awaited(value))
            if inspect.isgenerator(value):
                value = await self._threads.run(partial(run.taken, value))
        if inspect.isasyncgen(value):
            await self._coroutines.run(run.take_async(value))
            value = run
        return await run.chunks.result() if value is run else ToolResult(data=value, admitted=True)

    async def _in_subprocess(self, source: str, run: _PythonRun) -> ToolResult:
        from noetl_dagster.tools.python.process import bytes_of, run_in_process

        call, program, memory = run.call, run.program, _option(run.call, "memory")
        wanted = program.wanted.union(program.asks) - call.input.keys()
        names = await self._threads.run(lambda: run.scope.values_of(wanted - {"context"}))
        context = await self._threads.run(run.scope.context().portable) if "context" in wanted else None
        request = {
            "source": source,
            "name": f"{call.step}.{call.task.name}",
            "input": admit(call.input, "input"),
            "scope": admit(names, "context"),
            "context": None if context is None else admit(context, "context"),
            "rendered": run.rendered,
            "libs": call.config.get("libs"),
            "chunk_bytes": run.chunks.chunk_bytes,
            "seeks": run.seeks,
            "position": run.position if run.seeks else None,
        }
        confined = confinement(run.tool_context.settings, None if memory is None else bytes_of(memory))
        return await run_in_process(request, Printed(call.step), run.chunks, run.tool_context.settings, confined)


@dataclass(eq=False)
class _PythonRun:
    """One call: runs its code, and stores the rows that a generator yields in another thread.

    While a chunk is being stored the generator makes the next one, and then waits: two are in memory at most.

    Attributes:
        rendered: the values of the templates in its code.
        position: where code that reads it resumes, else ``NO_POSITION``.
    """

    call: ToolCall
    tool_context: ToolContext
    program: Program
    rendered: Mapping[str, Any]
    chunks: ChunkedResult
    position: Any

    def __post_init__(self) -> None:
        self.seeks = self.position is not NO_POSITION
        self._loop = asyncio.get_running_loop()
        self.scope = LiveScope(self.call.scope, self.tool_context, self._loop)
        self._storing: concurrent.futures.Future[bool] | None = None
        self._closed = False

    def code(self) -> Any:
        """Runs the code. Returns its value, itself if it yielded, or a coroutine for an event loop."""
        value = run_program(
            self.program,
            self.call.input,
            self.scope,
            libs=self.call.config.get("libs"),
            context=self.scope.context,
            printer=Printed(self.call.step),
            rendered=self.rendered,
            position=self.position,
        )
        return value if inspect.iscoroutine(value) else self.taken(value)

    def taken(self, value: Any) -> Any:
        """Returns a value in a form for the store, itself for a generator, an async generator unchanged."""
        if inspect.isgenerator(value):
            self._take(value)
            return self
        return value if inspect.isasyncgen(value) else finished(value, self.program)

    async def awaited(self, coroutine: Any) -> Any:
        """Returns the value of an async ``main`` in a form for the store; generators unchanged."""
        with FailureOf(self.program):
            value = await coroutine
        is_yielding = inspect.isgenerator(value) or inspect.isasyncgen(value)
        return value if is_yielding else finished(value, self.program)

    def _take(self, values: Generator[Any, Any, Any]) -> None:
        """Stores all values of a generator, in its thread."""
        cut = chunks_of(values, self.program, self.chunks.chunk_bytes, seeks=self.seeks)
        with closing(cut) as chunks:
            try:
                for chunk in chunks:
                    if not self._is_stored():
                        return
                    self._store(chunk)
            except (CodeFailure, RefusedValueError):
                self._is_stored()  # earlier chunks are kept
                raise
        self._is_stored()

    async def take_async(self, values: AsyncGenerator[Any, Any]) -> None:
        """Stores all values of an async generator, in its event loop."""
        cut = async_chunks_of(values, self.program, self.chunks.chunk_bytes, seeks=self.seeks)
        async with aclosing(cut) as chunks:
            async for chunk in chunks:
                if not await asyncio.wrap_future(self._store(chunk)):
                    return

    def close(self) -> None:
        """Cancels storing when the call is over, so that the generator's thread stops waiting."""
        self._closed = True
        if self._storing is not None:
            self._storing.cancel()

    def _store(self, chunk: Gathered) -> concurrent.futures.Future[bool]:
        self._storing = asyncio.run_coroutine_threadsafe(self._put(chunk), self._loop)
        return self._storing

    def _is_stored(self) -> bool:
        """Waits for the latest chunk; False if the rest is stored already."""
        return self._storing is None or self._storing.result()

    async def _put(self, chunk: Gathered) -> bool:
        if self._closed:  # meanwhile
            raise asyncio.CancelledError
        return await self.chunks.put(chunk)


async def rendered_templates(program: Program, source: str, call: ToolCall, context: ToolContext) -> Mapping[str, Any]:
    """Returns the values of the templates in a program's code, by their variables: JSON values, dates as text.

    ``{{ rows | tojson }}`` becomes the value itself, since as code it is a list.

    Raises:
        TemplateError: a template does not parse, or a name is undefined.
        RefusedValueError: a value has no stored form.
    """
    if not program.templates:
        return NO_VALUES
    values = {}
    for template in program.templates:
        place = code_place(call.task, source, template.line)
        try:
            value = await render_async(compile_value(template.source), call.scope, context.results.get)
            if ENDS_IN_TOJSON.search(template.source):
                value = orjson.loads(value)
            values[template.name] = admit(value, f"{place}: {template.source}")
        except TemplateError as error:
            raise type(error)(f"{error} ({place})") from None
    return values


class _CoroutineLoop:
    """An event loop in a thread for async ``main`` functions, so that blocking code never stops the worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Any) -> Any:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="noetl-code-loop", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


def _option(call: ToolCall, name: str) -> Any:
    return call.task.spec.options.get(name, call.config.get(name))


def _tool_error(failure: CodeFailure, call: ToolCall, source: str) -> ToolError:
    where = code_place(call.task, source, failure.line)
    inside = f", in {failure.function}" if failure.function and failure.function != "module" else ""
    return ToolError(
        f"{failure.exception_type}: {failure.message} ({where}{inside})",
        kind="python",
        retryable=failure.transient,
        details={"py": {"exception_type": failure.exception_type, "line": failure.line}},
    )


def code_place(task: Task, source: str, line: int | None) -> str:
    """Returns ``file:line`` of a line of a task's code, in the playbook if the file still contains the code."""
    if task.place is None or "script" in task.config:
        script = task.config.get("script")
        name = script.get("uri") if isinstance(script, Mapping) else script
        return f"{name or 'code'}, line {line}" if line else str(name or "code")
    start = _code_start(task.place.file, task.place.line, source)
    if line is None or start is None:
        return f"{task.place.file}:{task.place.line}" + (f", line {line} of the code" if line else "")
    return str(replace(task.place, line=start + line - 1)).rpartition(":")[0]


@lru_cache(maxsize=256)
def _code_start(file: str, line: int, source: str) -> int | None:
    """Returns the line of a playbook file where the code begins, found by its lines below the task's place."""
    wanted = [text.strip() for text in source.rstrip().splitlines()]
    try:
        lines = [text.strip() for text in Path(file).read_text().splitlines()]
    except OSError:
        return None
    for start in range(line - 1, len(lines) - len(wanted) + 1):
        if lines[start : start + len(wanted)] == wanted:
            return start + 1
    return None
