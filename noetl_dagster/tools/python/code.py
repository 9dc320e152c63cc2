"""Compiles and runs playbook code in Python, and gathers what it yields into chunks; failures name the line.

Imports little, so that the subprocess of ``isolation: subprocess`` starts fast.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dis
import inspect
import logging
import traceback
from collections import ChainMap
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, MutableMapping
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, cast

from noetl_dagster.playbook.code import (
    FELL_OFF,
    Expression,
    compile_python,
    expressions_in,
    without_expressions,
    yields_in,
)
from noetl_dagster.playbook.templates.views import plain
from noetl_dagster.process.interrupts import Interrupted
from noetl_dagster.tools.chunks.gather import Gathered, Gathering
from noetl_dagster.tools.python.libs import import_libs
from noetl_dagster.values import RefusedValueError, admit, is_table

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("noetl_dagster.tools.python.output")

PRINTED_CHARACTERS = 65_536
NOTE = "the code defines neither main nor result"
CONTEXT_NAMES = ("context", "execution_id")
"""Names that code has without an input of that name, in addition to ``input_data``."""

POSITION = "position"
"""Variable for code that yields: the position that it yielded with the last stored rows, at first None."""

_READING, _SETTING = frozenset({"LOAD_NAME", "LOAD_GLOBAL"}), frozenset({"STORE_NAME", "STORE_GLOBAL"})
NO_VALUES: Mapping[str, Any] = {}
NO_POSITION = object()

EXIT_REMEDY = "code ends with 'result = ...' or a return from main, and fails with any other exception"


@dataclass(eq=False)
class CodeFailure(Exception):
    """Playbook code raised, does not parse, or returned a value without a JSON form.

    Attributes:
        line: of the code, counted from 1; None when unknown.
        function: innermost function of the code that the exception passed.
        transient: a lost connection or a time-out; another attempt may succeed.
    """

    exception_type: str
    message: str
    line: int | None
    function: str = ""
    transient: bool = False

    def __str__(self) -> str:
        return f"{self.exception_type}: {self.message}"


@dataclass(frozen=True, slots=True)
class Program:
    """Compiled code.

    Attributes:
        name: its file name in tracebacks.
        returns: it has ``return`` or ``yield`` at its top level, and is the code of a function.
        seeks: it reads ``position`` to resume, unless its context has this name.
        asks: the names of the context that it may use.
        wanted: the parameters of its ``main``.
        templates: the ``{{ expressions }}`` of the code.
    """

    code: CodeType
    name: str
    returns: bool
    seeks: bool
    asks: tuple[str, ...]
    wanted: frozenset[str]
    templates: tuple[Expression, ...]

    def run(self, names: dict[str, Any]) -> Any:
        """Runs it with its global names. Returns the value of a top-level ``return``, else ``FELL_OFF``."""
        if self.returns:
            names["__builtins__"] = builtins  # as exec does; extension modules that import look here
            return FunctionType(self.code, names)()
        exec(self.code, names)
        return FELL_OFF


@dataclass(slots=True)
class Printed:
    """Replaces ``print`` in one call: writes to the log line by line, up to a limit."""

    step: str
    left: int = PRINTED_CHARACTERS

    def __call__(self, *values: Any, sep: str | None = " ", end: str | None = "\n", **other: Any) -> None:
        """Logs the values as ``print`` would write them; writes to ``file`` if that is set."""
        if other.get("file") is not None:
            print(*values, sep=sep, end=end, **other)
            return
        if self.left <= 0:
            return
        text = (" " if sep is None else sep).join(map(str, values))[: self.left]
        self.left -= len(text) + 1
        logger.info("%s: %s", self.step, text)
        if self.left <= 0:
            more = "%s: printed more than %d characters; the rest is left out"
            logger.warning(more, self.step, PRINTED_CHARACTERS)


def _reads_position(code: CodeType) -> bool:
    """Reports whether code reads ``position`` before it sets it."""
    steps = (step for part in _parts_of(code) for step in dis.get_instructions(part))
    uses = (step.opname for step in steps if step.argval == POSITION)
    return next((name in _READING for name in uses if name in _READING | _SETTING), False)


def _parts_of(code: CodeType) -> Iterator[CodeType]:
    """Yields code and all code that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of(constant)


@lru_cache(maxsize=256)
def compile_code(source: str, name: str) -> Program:
    """Compiles code. Raises ``CodeFailure`` for a syntax error, with its line."""
    filename = f"<{name}>"
    expressions = expressions_in(source)
    text = without_expressions(source, expressions)
    try:
        code, returns = compile_python(text, filename)
        read = {name for part in _parts_of(code) for name in part.co_names}
        wanted, main_yields = _main_of(text)
        return Program(
            code,
            filename,
            returns,
            seeks=main_yields if POSITION in wanted else POSITION in text and _reads_position(code),
            asks=tuple(name for name in CONTEXT_NAMES if name in read),
            wanted=wanted,
            templates=expressions,
        )
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise CodeFailure(type(error).__name__, message, line) from None


def run_program(
    program: Program,
    input: Mapping[str, Any],
    scope: Mapping[str, Any],
    *,
    libs: Any = None,
    context: Callable[[], Any] = dict,
    printer: Callable[..., None] = print,
    rendered: Mapping[str, Any] = NO_VALUES,
    position: Any = NO_POSITION,
) -> Any:
    """Executes a program and calls its ``main``.

    Args:
        input: variables of the code and arguments of ``main``.
        scope: further names for arguments of ``main``.
        context: makes ``context`` for the code and ``main``.
        rendered: values of the program's templates, by their variables.
        position: for a program that seeks, where it resumes.

    Returns:
        The value, the coroutine of an async ``main``, or a generator.

    Raises:
        CodeFailure: the code raised.
    """
    values = {name: plain(value) for name, value in input.items()}
    names: dict[str, Any] = {"__name__": "__playbook__", "print": printer, "input_data": values, **values}
    passed = {name for name in values if name in ("main", "result")}
    if position is not NO_POSITION:
        names[POSITION] = position
        scope = ChainMap({POSITION: position}, cast(MutableMapping[str, Any], scope))
    with FailureOf(program):
        for name in program.asks:
            if name not in names and (name == "context" or name in scope):
                names[name] = context() if name == "context" else scope[name]
        names.update(import_libs(libs))
        names.update(rendered)
        value = program.run(names)
        if value is not FELL_OFF:
            return value
        main = names.get("main")
        if callable(main) and "main" not in passed:
            return call_main(main, values, scope, context)
    if "result" in names and ("result" not in passed or names["result"] is not values["result"]):
        return names["result"]
    return {"status": "ok", "note": NOTE}


def finished(value: Any, program: Program) -> Any:
    """Returns a result in its stored form: a frame as an Arrow table, everything else as JSON values.

    Raises:
        RefusedValueError: it has no such form.
        CodeFailure: a lazy part of it raised.
    """
    with FailureOf(program):
        return arrow_table(value) if is_table(value) else admit(value)


def call_main(
    main: Callable[..., Any], values: Mapping[str, Any], scope: Mapping[str, Any], context: Callable[[], Any]
) -> Any:
    """Calls ``main`` with the values that its parameters name: from the input, else from the scope."""
    parameters, open_ended = _parameters(main)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, default, only_positional in parameters:
        if name in values:
            value = values[name]
        elif name == "context":
            value = context()
        elif name == "input_data":
            value = dict(values)
        elif name in scope:
            value = scope[name]
        elif default:
            continue
        else:
            names = ", ".join(sorted(values)) or "nothing"
            raise TypeError(f"main needs {name!r}, which neither input ({names}) nor the context has")
        if only_positional:
            positional.append(value)
        else:
            keywords[name] = value
    if open_ended:
        keywords.update({name: value for name, value in values.items() if name not in keywords})
    return main(*positional, **keywords)


_Parameters = tuple[tuple[tuple[str, bool, bool], ...], bool]
"""Name, has a default, only positional, of each parameter; and whether the function accepts any keyword."""


def _parameters(main: Callable[..., Any]) -> _Parameters:
    if inspect.isfunction(main) and not hasattr(main, "__wrapped__"):
        defaults = len(main.__defaults__ or ()), frozenset(main.__kwdefaults__ or ())
        return _parameters_of_code(main.__code__, *defaults)
    kinds, parameters = inspect.Parameter, inspect.signature(main).parameters.values()
    described = tuple(
        (item.name, item.default is not kinds.empty, item.kind is kinds.POSITIONAL_ONLY)
        for item in parameters
        if item.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    )
    return described, any(item.kind is kinds.VAR_KEYWORD for item in parameters)


@lru_cache(maxsize=512)
def _parameters_of_code(code: CodeType, defaults: int, keyword_defaults: frozenset[str]) -> _Parameters:
    plain, only_positional = code.co_argcount, code.co_posonlyargcount
    names = code.co_varnames
    described = [(names[place], place >= plain - defaults, place < only_positional) for place in range(plain)]
    only_keyword = names[plain : plain + code.co_kwonlyargcount]
    described += [(name, name in keyword_defaults, False) for name in only_keyword]
    return tuple(described), bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _main_of(source: str) -> tuple[frozenset[str], bool]:
    """Returns the parameters of ``main`` in the source, and whether it is a generator."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "main":
            signature = node.args
            parameters = (item.arg for item in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs))
            return frozenset(parameters), yields_in(node.body)
    return frozenset(), False


class FailureOf:
    """A block in which playbook code runs: whatever it raises becomes a ``CodeFailure``.

    Only errors about the code's values pass, and what ends the call from outside: the interrupt of abandoned code, and
    the cancellation of its task. Code that raises ``CancelledError`` or ``GeneratorExit`` itself fails.
    """

    __slots__ = ("_program",)

    def __init__(self, program: Program) -> None:
        self._program = program

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Interrupted | RefusedValueError):
            return
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            return
        raise failure_of(error, self._program) from None


def _is_being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # in a thread
        return False
    return task is not None and task.cancelling() > 0


def failure_of(error: BaseException, program: Program) -> CodeFailure:
    """Returns the failure with the last line of the program that the exception passed."""
    if isinstance(error, CodeFailure):
        return error
    line, function = None, ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == program.name:
            line, function = frame.lineno, frame.name
    transient = isinstance(error, ConnectionError | TimeoutError)
    message = f"{error}; {EXIT_REMEDY}" if isinstance(error, SystemExit) else str(error)
    return CodeFailure(type(error).__name__, message, line, function.strip("<>"), transient)


def chunks_of(
    values: Generator[Any, Any, Any], program: Program, chunk_bytes: int, *, seeks: bool
) -> Generator[Gathered, None, None]:
    """Yields the chunks of a generator, which continues when the next one is requested and is closed in any case.

    Args:
        seeks: each value is a pair of rows and a position.

    Raises:
        CodeFailure: the generator raised, or yielded a value that is no pair or has no JSON form.
    """
    gathering, ended = Gathering(chunk_bytes), object()
    with closing(values):
        while True:
            with FailureOf(program):
                if (value := next(values, ended)) is ended:
                    break
                taken = list(gathering.add(*_rows_and_position(value, seeks=seeks)))
            yield from taken
    if (rest := gathering.rest()) is not None:
        yield rest


async def async_chunks_of(
    values: AsyncGenerator[Any, Any], program: Program, chunk_bytes: int, *, seeks: bool
) -> AsyncGenerator[Gathered, None]:
    """Yields the chunks of an async generator, as :func:`chunks_of` does."""
    gathering, ended = Gathering(chunk_bytes), object()
    async with aclosing(values):
        while True:
            with FailureOf(program):
                if (value := await anext(values, ended)) is ended:
                    break
                taken = list(gathering.add(*_rows_and_position(value, seeks=seeks)))
            for chunk in taken:
                yield chunk
    if (rest := gathering.rest()) is not None:
        yield rest


def _rows_and_position(value: Any, *, seeks: bool) -> tuple[list[Any] | pa.Table, Any]:
    position = None
    if seeks:
        if not isinstance(value, tuple) or len(value) != 2:
            kind = type(value).__name__
            raise TypeError(f"code that asks for 'position' yields pairs, 'yield rows, position'; it gave a {kind}")
        value, position = value[0], admit(value[1], "position")
    if is_table(value):
        return arrow_table(value), position
    return admit(value if isinstance(value, list) else [value], "a yielded value"), position


def arrow_table(value: Any) -> pa.Table:
    """Returns a pandas or polars frame or an Arrow table or batch as an Arrow table."""
    from noetl_dagster.storage.codec import as_arrow_table

    return as_arrow_table(value, "result")
