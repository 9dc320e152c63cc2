"""Reads the text of a template. Braces of other programs are marked as text before Jinja parses it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from jinja2 import TemplateSyntaxError, nodes

from noetl_dagster.playbook.templates.environment import PlaybookEnvironment, StrictName, TooComplexError

ENVIRONMENT = PlaybookEnvironment()
STRICT_ENVIRONMENT = PlaybookEnvironment(StrictName)

# shapes that can never be Jinja, in no text: Go templates (docker --format '{{.Names}}'), ${#array} of shells, array
# literals of PostgreSQL ('{{1,2},{3,4}}')
_SHAPES = re.compile(r"\{\{-?\s*\.[^{}]*\}\}|\{\{-?\s*(?:range|if|with)\s[^{}]*\}\}|(?<=\$)\{#|\{\{[-\w\s,.]*\}(?!\})")
_GO_BLOCK = re.compile(r"\{\{-?\s*(?:(?:range|if|with)\s|(?:block|define)\s+[\"`])")
_GO_WORD = re.compile(r"\{\{-?\s*(else|end|break|continue)\s*-?\}\}")

_OPENING = re.compile(r"\{[{%#]")
_TAG = re.compile(
    r"\{%[-+]?\s*(?:(?:end)?(?:if|for|set|with|macro|call|filter|block|autoescape)"
    r"|elif|else|extends|include|import|from|print|do)\b"
)
_RAW = re.compile(r"\{%[-+]?\s*raw\s*-?%\}")
_RAW_END = re.compile(r"\{%[-+]?\s*endraw\s*[-+]?%\}")
_LINE_ENDS = re.compile(r"\r\n|\r")

_LONGEST = 4_096
"""Characters up to which an expression or tag is looked at, in a text with braces of other programs."""

_MOST = 200
"""Parts of a text that may turn out to be no templates. Looking at each takes up to some milliseconds."""

_KEPT = 100
_SHOWN = 60
_SHOWN_BEFORE = 1_000


class Foreign(NamedTuple):
    """Braces of another program, which stay as they are.

    Attributes:
        source: the part of the text from the first to the closing braces; of a long one the first 60 characters.
        line: of the text, from 1.
    """

    source: str
    line: int


class Read(NamedTuple):
    """The text of a template as Jinja gets it.

    Attributes:
        text: with braces of other programs in ``{% raw %}``; without white space around a single expression.
        line: of the source, from 1, where it begins.
        foreign: these braces, at most 100.
        is_plain: whether nothing but these braces looked like a template, so that there is nothing to render.
    """

    text: str
    line: int
    foreign: tuple[Foreign, ...] = ()
    is_plain: bool = False

    def tree(self) -> nodes.Template:
        """Parses it."""
        return nodes.Template([]) if self.is_plain else ENVIRONMENT.parse(self.text)


def read(source: str, *, command: bool = False) -> tuple[Read, nodes.Template]:
    """Parses a text.

    Args:
        command: it is a command. Each part that does not parse belongs to another program then, and stays as it is. In
            other texts only what can never be meant for Jinja does.

    Raises:
        TemplateSyntaxError: it does not parse.
    """
    text = source.strip()
    is_whole = text.startswith("{{") and text.endswith("}}")  # else white space belongs to the text
    text = text if is_whole else source
    line = source.count("\n", 0, source.index(text)) + 1
    text_read = Read(text, line) if _SHAPES.search(text) is None else _without_foreign(text, line, command=False)
    try:
        return text_read, text_read.tree()
    except TemplateSyntaxError as error:
        if not command or isinstance(error, TooComplexError):
            raise
    text_read = _without_foreign(text, line, command=True)
    return text_read, text_read.tree()


def _without_foreign(text: str, first: int, *, command: bool) -> Read:
    """Marks the opening braces of other programs. What follows them may be a template again."""
    text = _LINE_ENDS.sub("\n", text)  # as Jinja does
    parts: list[str] = []
    foreign: list[Foreign] = []
    done = position = counted = shown = blocks = unread = 0
    line, is_plain = first, True
    while (opening := _OPENING.search(text, position)) is not None:
        start = opening.start()
        is_shape = _SHAPES.match(text, start) is not None
        word = _GO_WORD.match(text, start) if blocks else None
        if not is_shape and word is None:
            end = _end_of_template(text, start, parses=command)
            if end is not None or not command:
                position, is_plain = end or start + 2, False  # without an end, Jinja says what is wrong
                continue
            unread += 1
        line, counted = line + text.count("\n", counted, start), start
        if unread > _MOST:
            message = f"more than {_MOST} parts are no templates; move the text into a script file"
            raise TooComplexError(message, line)
        if _GO_BLOCK.match(text, start):
            blocks += 1
        elif word is not None and word[1] == "end":
            blocks -= 1
        if len(foreign) < _KEPT and start >= shown:
            part = _shown_part(text, start)
            foreign.append(Foreign(part, line))
            shown = start + len(part)
        position = start + 2
        parts += (text[done:start], "{% raw %}", text[start:position], "{% endraw %}")
        done = position
    return Read("".join((*parts, text[done:])), first, tuple(foreign), is_plain)


def _end_of_template(text: str, start: int, *, parses: bool) -> int | None:
    """Returns where the expression, tag or comment ends that begins at ``start``; None if there is none.

    Args:
        parses: an expression must parse.

    Raises:
        TooComplexError: an expression exceeds a limit.
    """
    kind = text[start + 1]
    if kind == "#":
        closing = text.find("#}", start + 2)
        return None if closing < 0 else closing + 2
    if kind == "%":
        raw = _RAW.match(text, start)
        if raw is not None:
            closed = _RAW_END.search(text, raw.end())
            return len(text) if closed is None else closed.end()
        return _end_of_tokens(text, start, "%}") if _TAG.match(text, start) else None
    end = _end_of_tokens(text, start, "}}")
    if end is None or not parses:
        return end
    try:
        ENVIRONMENT.parse(text[start:end])
    except TooComplexError:
        raise
    except TemplateSyntaxError:
        return None
    return end


def _end_of_tokens(text: str, start: int, closing: str) -> int | None:
    """Returns where Jinja's lexer sees the end; closing braces in a string or a mapping are none."""
    first = text.find(closing, start + 2, start + _LONGEST)
    for stop in () if first < 0 else (first + 2, start + _LONGEST):
        length = 0
        try:
            for _, token, value in ENVIRONMENT.lex(text[start:stop]):
                length += len(value)
                if token in ("variable_end", "block_end"):
                    return start + length
        except TemplateSyntaxError:
            continue
    return None


def _shown_part(text: str, start: int) -> str:
    begin = start - 1 if text[start + 1] == "#" and text[start - 1 : start] == "$" else start
    part = text[begin : begin + _SHOWN].partition("\n")[0]
    end = part.find("}}") + 1 if text[start + 1] == "{" else 0
    end = end or part.find("}")
    return part.rstrip() if end < 0 else part[: end + 1]


def whole_expression(tree: nodes.Template) -> nodes.Expr | None:
    """Returns the expression of a template that is nothing else, such as ``{{ rows | length }}``."""
    match tree.body:
        case [nodes.Output(nodes=[expression])] if not isinstance(expression, nodes.TemplateData):
            return expression
    return None


class Output(NamedTuple):
    """An expression whose value becomes part of a text.

    Attributes:
        source: the expression with its braces.
        line: of the text, from 1.
        before: the text before it in its line, without other templates; of a long line the last 1,000 characters.
        bound: expressions of variables that the text binds, by name.
    """

    source: str
    line: int
    before: str
    expression: nodes.Expr
    bound: Mapping[str, list[nodes.Node]]


def outputs_in(source: str, *, command: bool = False) -> list[Output]:
    """Returns the expressions that a text renders, in their order.

    Raises:
        TemplateSyntaxError: it does not parse; see :func:`read`.
    """
    outputs: list[Output] = []
    before, inside = "", ""
    (text, first, *_), tree = read(source, command=command)
    bound = dict[str, list[nodes.Node]]()
    for node in tree.find_all((nodes.Assign, nodes.For)):
        match node:
            case (
                nodes.Assign(target=nodes.Name(name=name), node=value)
                | nodes.For(target=nodes.Name(name=name), iter=value)
            ):
                bound.setdefault(name, []).append(value)
    for line, token, part in ENVIRONMENT.lex(text):
        if token == "variable_begin" or inside:
            inside += part
        elif token == "data":
            before = (before + part).rpartition("\n")[2][-_SHOWN_BEFORE:]
        if token == "variable_end":
            expression = whole_expression(ENVIRONMENT.parse(inside))
            if expression is not None:
                start = line - inside.count("\n") + first - 1
                outputs.append(Output(inside.strip(), start, before, expression, bound))
            inside = ""
    return outputs
