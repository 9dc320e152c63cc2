"""Python code as playbooks write it: ``return``, ``yield`` at its top level, ``{{ expressions }}`` between its texts.

Imports nothing of the project, for the subprocess that runs code starts fast.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from types import CodeType
from typing import Any

FELL_OFF = ...
"""The result of code with a ``return`` at its top level that ends without one."""

_TEMPLATE = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_OF_FUNCTIONS = (ast.Return, ast.Yield, ast.YieldFrom)
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # from Python 3.12 on
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)


@dataclass(frozen=True, slots=True)
class Expression:
    """A template in code.

    Attributes:
        name: the variable that stands in its place.
        source: the template, braces included.
        start, stop: where it stands in the code, in characters.
        line, column: where it begins; both count from 1.
    """

    name: str
    source: str
    start: int
    stop: int
    line: int
    column: int


def expressions_in(source: str) -> tuple[Expression, ...]:
    """Returns the templates outside of string literals and comments, in their order.

    ``{{ ... }}`` is a set with a set or a mapping in it, which Python can never build; so none was meant for it.
    """
    expressions: list[Expression] = []
    try:
        for start, stop in sorted(_double_braces(source)) if "{{" in source else ():
            if not expressions or start >= expressions[-1].stop:  # else inside of the one before
                expressions.append(_expression(f"__{len(expressions)}__", source, start, stop))
    except (tokenize.TokenError, SyntaxError):  # compiling the code reports the error
        return ()
    return tuple(expressions)


def templates_in_texts(source: str) -> tuple[Expression, ...]:
    """Returns the templates inside of string literals, which are text; not of f-strings, where ``{{`` is a brace."""
    expressions: list[Expression] = []
    try:
        for token, begin, _ in _tokens(source) if "{{" in source else ():
            if token.type == tokenize.STRING and "f" not in token.string.lower().partition(token.string[-1])[0]:
                spans = ((begin + match.start(), begin + match.end()) for match in _TEMPLATE.finditer(token.string))
                expressions += [_expression("", source, start, stop) for start, stop in spans]
    except (tokenize.TokenError, SyntaxError):
        return ()
    return tuple(expressions)


def _expression(name: str, source: str, start: int, stop: int) -> Expression:
    line, column = source.count("\n", 0, start) + 1, start - source.rfind("\n", 0, start)
    return Expression(name, source[start:stop], start, stop, line, column)


def without_expressions(source: str, expressions: tuple[Expression, ...]) -> str:
    """Returns the code with a variable in place of each template; what follows keeps its line and column."""
    parts, done = [], 0
    for expression in expressions:
        parts.append(source[done : expression.start])
        lines = "\n" * expression.source.count("\n")
        padded = expression.name.ljust(len(expression.source))
        parts.append(f"({expression.name}{lines})" if lines else padded)
        done = expression.stop
    return "".join((*parts, source[done:]))


def compile_python(source: str, filename: str) -> tuple[CodeType, bool]:
    """Compiles code without templates.

    Returns:
        The code, and whether it returns or yields: then it is the code of a function without arguments, whose
        variables are all global, so that functions in it see them as those of a module.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    tree = compile(source, filename, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    if not any(isinstance(node, _OF_FUNCTIONS) for node in _top_level(tree.body)):
        return compile(tree, filename, "exec", dont_inherit=True), False
    code = _function_code(tree, filename, ())
    return _function_code(tree, filename, (*code.co_varnames, *code.co_cellvars)), True


def _double_braces(source: str) -> Iterator[tuple[int, int]]:
    """Yields begin and end of every ``{{ ... }}`` whose braces belong together."""
    opened: list[int] = []
    inner: tuple[int, int] | None = None  # the braces that were closed last
    fstrings = 0
    for token, start, stop in _tokens(source):
        fstrings += (token.type == _FSTRING_START) - (token.type == _FSTRING_END)
        if fstrings or token.type != tokenize.OP:
            continue
        if token.string == "{":
            opened.append(start)
        elif token.string == "}" and opened:
            brace = opened.pop()
            if inner == (brace + 1, start):
                yield brace, stop
            inner = (brace, stop)


def _tokens(source: str) -> Iterator[tuple[tokenize.TokenInfo, int, int]]:
    """Yields the tokens of code, with begin and end in characters."""
    starts = [0, *accumulate(len(line) for line in io.StringIO(source))]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (line, column), (last, end) = token.start, token.end
        yield token, starts[line - 1] + column, starts[last - 1] + end


def yields_in(body: list[ast.stmt]) -> bool:
    """Reports whether a function of these statements is a generator."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _top_level(body))


def _top_level(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yields the nodes that run with the code itself; bodies of functions and classes are left out."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _INNER):
            waiting.extend(ast.iter_child_nodes(node))


class _WithoutAnnotations(ast.NodeTransformer):
    """``x: int = 1`` as ``x = 1``: a name that is declared global cannot be annotated."""

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, _INNER) else super().visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _function_code(tree: ast.Module, filename: str, names: tuple[str, ...]) -> CodeType:
    """Returns the code as that of a function whose variables ``names`` are global."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    from_future = [node for node in imports if node.module == "__future__"]
    body = [_WithoutAnnotations().visit(node) for node in tree.body if node not in from_future]
    around = ast.parse("def code(): pass")
    function = around.body[0]
    assert isinstance(function, ast.FunctionDef)
    declared: list[ast.stmt] = [ast.Global(list(names))] if names else []
    function.body = [*declared, *body, ast.Return(ast.Constant(FELL_OFF))]
    around.body = [*from_future, function]
    module = compile(ast.fix_missing_locations(around), filename, "exec", dont_inherit=True)
    code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    return code.replace(co_name="<module>", co_qualname="<module>")
