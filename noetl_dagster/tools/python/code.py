"""Playbook code in Python: compiled once, given its input, run, and blamed by line when it fails.

Imports little, so that the subprocess of ``isolation: subprocess`` starts fast.
"""

from __future__ import annotations

import ast
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from noetl_dagster.playbook.code import (
    FELL_OFF,
    Expression,
    compile_python,
    expressions_in,
    without_expressions,
)
from noetl_dagster.playbook.templates.views import copied
from noetl_dagster.tools.python.libs import import_libs
from noetl_dagster.tools.rows.jsonable import is_table, to_jsonable

logger = logging.getLogger("noetl_dagster.tools.python.output")

PRINTED_CHARACTERS = 65_536
NOTE = "the code defines neither main nor result"
CONTEXT_NAMES = ("context", "execution_id")
"""Names that code has without an input of that name, beside ``input_data``."""

NO_VALUES: Mapping[str, Any] = {}
_NOTHING = object()

FAILURES = (Exception, SystemExit, KeyboardInterrupt)
"""What fails a step when its code raises it. An interrupt of abandoned code is not among them."""

EXIT_REMEDY = "code ends with 'result = ...' or a return from main, and fails with any other exception"


class CodeFailure(Exception):
    """Playbook code raised, does not parse, or gave a value that no JSON can hold.

    Attributes:
        exception_type: name of the exception's class.
        line: line of the code, counted from 1; None when unknown.
        function: innermost function of the code that the exception passed.
        transient: it was a lost connection or a time-out, so another try may succeed.
    """

    def __init__(
        self, exception_type: str, message: str, line: int | None, function: str = "", transient: bool = False
    ) -> None:
        super().__init__(f"{exception_type}: {message}")
        self.exception_type = exception_type
        self.message = message
        self.line = line
        self.function = function
        self.transient = transient


@dataclass(frozen=True, slots=True)
class Program:
    """Compiled code.

    Attributes:
        name: stands for its file in tracebacks.
        returns: whether it ends with ``return`` at its top level, and is the code of a function.
        asks: the names of the context that it may use.
        wanted: the parameters of its ``main``.
        templates: the ``{{ expressions }}`` of the code.
    """

    code: CodeType
    name: str
    returns: bool
    asks: tuple[str, ...]
    wanted: frozenset[str]
    templates: tuple[Expression, ...]

    def run(self, names: dict[str, Any]) -> Any:
        """Runs it over its global names; gives what it returned at its top level, else ``FELL_OFF``."""
        if self.returns:
            return FunctionType(self.code, names)()
        exec(self.code, names)
        return FELL_OFF


@dataclass(slots=True)
class Printed:
    """What ``print`` of one call wrote: goes to the log line by line, up to a bound."""

    step: str
    redact: Callable[[str], str] = str
    left: int = PRINTED_CHARACTERS

    def __call__(self, *values: Any, sep: str | None = " ", end: str | None = "\n", **other: Any) -> None:
        if other.get("file") is not None:
            print(*values, sep=sep, end=end, **other)
            return
        if self.left <= 0:
            return
        text = (" " if sep is None else sep).join(map(str, values))[: self.left]
        self.left -= len(text) + 1
        logger.info("%s: %s", self.step, self.redact(text))
        if self.left <= 0:
            logger.warning("%s: printed more than %d characters; the rest is left out", self.step,
                           PRINTED_CHARACTERS)  # fmt: skip


def _names_of(code: CodeType) -> set[str]:
    """The global names that code and what is defined in it read."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_of, inner))


@lru_cache(maxsize=256)
def compile_code(source: str, name: str) -> Program:
    """Compiles code.

    Raises:
        CodeFailure: a syntax error, with its line.
    """
    filename = f"<{name}>"
    expressions = expressions_in(source)
    text = without_expressions(source, expressions)
    try:
        code, returns = compile_python(text, filename)
        read = _names_of(code)
        return Program(
            code,
            filename,
            returns,
            asks=tuple(name for name in CONTEXT_NAMES if name in read),
            wanted=_wanted_names(text),
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
) -> Any:
    """Executes a program and calls its ``main``; gives the value, or the coroutine of an async ``main``.

    Args:
        input: variables of the code and arguments of ``main``.
        scope: further names that ``main`` may ask for by argument.
        context: makes what the code and ``main`` get as ``context``.
        rendered: values of the program's templates, by their variables.

    Raises:
        CodeFailure: whatever the code raised.
    """
    values = {name: copied(parse_literal(value)) for name, value in input.items()}
    names: dict[str, Any] = {"__name__": "__playbook__", "print": printer, "input_data": values, **values}
    given = {name for name in values if name in ("main", "result")}
    try:
        for name in program.asks:
            if name not in names and (name == "context" or name in scope):
                names[name] = context() if name == "context" else scope[name]
        names.update(import_libs(libs))
        names.update(rendered)
        value = program.run(names)
        if value is not FELL_OFF:
            return value
        main = names.get("main")
        if callable(main) and "main" not in given:
            return call_main(main, values, scope, context)
    except FAILURES as error:
        raise failure_of(error, program) from None
    if "result" in names and ("result" not in given or names["result"] is not values["result"]):
        return names["result"]
    return {"status": "ok", "note": NOTE}


def finished(value: Any, program: Program) -> Any:
    """A result as the store takes it: a table as it is, everything else as JSON values.

    Raises:
        CodeFailure: for a value without a JSON form.
    """
    if is_table(value):
        return value
    try:
        return to_jsonable(value)
    except Exception as error:
        raise failure_of(error, program) from None


def call_main(
    main: Callable[..., Any],
    values: Mapping[str, Any],
    scope: Mapping[str, Any],
    context: Callable[[], Any],
) -> Any:
    """Calls ``main`` with what its parameters name: from input, then from the scope."""
    parameters, open_ended = _parameters(main)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, default, only_positional in parameters:
        value = values.get(name, _NOTHING)
        if value is _NOTHING and name == "context":
            value = context()
        if value is _NOTHING and name == "input_data":
            value = dict(values)
        if value is _NOTHING and name in scope:
            value = scope[name]
        if value is _NOTHING:
            if default:
                continue
            known = ", ".join(sorted(values)) or "nothing"
            raise TypeError(f"main needs {name!r}, which neither input ({known}) nor the context has")
        if only_positional:
            positional.append(value)
        else:
            keywords[name] = value
    if open_ended:
        keywords.update({name: value for name, value in values.items() if name not in keywords})
    return main(*positional, **keywords)


def _parameters(main: Callable[..., Any]) -> tuple[tuple[tuple[str, bool, bool], ...], bool]:
    """Name, has a default, only positional; and whether ``main`` takes any keyword."""
    code = getattr(main, "__code__", None)
    if code is not None and not hasattr(main, "__wrapped__") and inspect.isfunction(main):
        defaults = len(main.__defaults__ or ()), frozenset(main.__kwdefaults__ or ())
        return _parameters_of_code(code, *defaults)
    return _parameters_of_signature(inspect.signature(main))


@lru_cache(maxsize=512)
def _parameters_of_code(
    code: CodeType, defaults: int, keyword_defaults: frozenset[str]
) -> tuple[tuple[tuple[str, bool, bool], ...], bool]:
    plain, only_positional = code.co_argcount, code.co_posonlyargcount
    names = code.co_varnames
    found = [(names[place], place >= plain - defaults, place < only_positional) for place in range(plain)]
    only_keyword = names[plain : plain + code.co_kwonlyargcount]
    found += [(name, name in keyword_defaults, False) for name in only_keyword]
    return tuple(found), bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _parameters_of_signature(signature: inspect.Signature) -> tuple[tuple[tuple[str, bool, bool], ...], bool]:
    kinds = inspect.Parameter
    found = tuple(
        (item.name, item.default is not kinds.empty, item.kind is kinds.POSITIONAL_ONLY)
        for item in signature.parameters.values()
        if item.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    )
    return found, any(item.kind is kinds.VAR_KEYWORD for item in signature.parameters.values())


def _wanted_names(source: str) -> frozenset[str]:
    """The parameters of the code's ``main``: what it may want from the scope. Empty for code without one."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "main":
            given = node.args
            return frozenset(item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    return frozenset()


def parse_literal(value: Any) -> Any:
    """Text that is a JSON or Python literal of a list or mapping as that; everything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    import orjson

    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        pass
    try:
        parsed = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
    return parsed if isinstance(parsed, list | dict) else value


def failure_of(error: BaseException, program: Program) -> CodeFailure:
    """The failure with the last line of the program that the exception passed."""
    if isinstance(error, CodeFailure):
        return error
    line, function = None, ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == program.name:
            line, function = frame.lineno, frame.name
    transient = isinstance(error, ConnectionError | TimeoutError)
    message = f"{error}; {EXIT_REMEDY}" if isinstance(error, SystemExit) else str(error)
    return CodeFailure(type(error).__name__, message, line, function.strip("<>"), transient)
