"""Splits SQL of a dialect into statements, and binds their parameters, by sqlglot's scanner of that dialect.

:mod:`~noetl_dagster.tools.sql.statements` does the same for PostgreSQL and DuckDB. It cannot read the backslashes,
backticks and ``#`` comments of other dialects. Spark binds its parameters itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from noetl_dagster.tools.sql.statements import BoundStatement

Params = Mapping[str, Any] | Sequence[Any]

_PLACE = re.compile(
    r"(?<![\w:$@\])\"`'])(?:"
    r":(?P<name>[A-Za-z_]\w*)"
    r"|\$(?P<number>[1-9][0-9]*)(?!\w)"
    r"|(?P<next>\?)"
    r"|%\((?P<percent>[A-Za-z_]\w*)\)s(?!\w)"
    r"|(?P<s>%s)(?!\w))"
)
_ROUTINES = frozenset({"TRIGGER", "PROCEDURE", "FUNCTION", "EVENT"})
_BLOCKS = frozenset({"BEGIN", "DECLARE"})
_TRANSACTIONS = frozenset({"TRANSACTION", "WORK", "NAME", "IMMEDIATE", "DEFERRED", "EXCLUSIVE", "CONCURRENT"})

Spans = tuple[tuple[int, int], ...]
"""Parts of a text without quotes and comments, by their beginnings and ends."""


SPARK = "spark"
"""Spark SQL as sqlglot scans it for Databricks, with the dollar quotes that it lacks there."""


@cache
def _scanner(dialect: str) -> Any:
    """Returns sqlglot's dialect. The import takes 0.5 s, so it is lazy."""
    from sqlglot import Dialect, TokenType
    from sqlglot.dialects.databricks import Databricks

    if dialect != SPARK:
        return Dialect.get_or_raise(dialect)

    class SparkSql(Databricks):
        class Tokenizer(Databricks.Tokenizer):
            HEREDOC_STRINGS = ["$"]  # noqa: RUF012
            HEREDOC_TAG_IS_IDENTIFIER = True
            HEREDOC_STRING_ALTERNATIVE = TokenType.PARAMETER

    return SparkSql()


@lru_cache(maxsize=128)
def split(sql: str, dialect: str) -> tuple[tuple[str, Spans], ...]:
    """Returns the statements of a script, each with its plain parts; empty ones and bare comments are left out.

    A routine with ``BEGIN``, or a block, stays in one piece together with all that follows it in the same text. So does
    text that cannot be scanned, for which the server reports the error.
    """
    from sqlglot import TokenType
    from sqlglot.errors import TokenError

    try:
        tokens = _scanner(dialect).tokenize(sql)
    except TokenError:
        return ((sql.strip(), ()),) if sql.strip() else ()
    statements: list[tuple[str, Spans]] = []
    start, spans, words = 0, list[tuple[int, int]](), list[str]()
    whole = False

    def end_statement(end: int) -> None:
        nonlocal start, spans
        if words:
            text = sql[start:end]
            before = start + len(text) - len(text.lstrip())
            statements.append((text.strip(), tuple((first - before, last - before) for first, last in spans)))
        start, spans = end + 1, []
        words.clear()

    for token in tokens:
        text = sql[token.start : token.end + 1]
        if token.token_type is TokenType.SEMICOLON and not whole:
            end_statement(token.start)
            continue
        words.append(text.upper() if len(words) < 64 else "")
        whole = whole or _begins_block(words, dialect)
        if text[-1:] in "'\"`]" or text.endswith("$$"):
            continue
        if spans and spans[-1][1] == token.start:
            spans[-1] = (spans[-1][0], token.end + 1)
        else:
            spans.append((token.start, token.end + 1))
    end_statement(len(sql))
    return tuple(statements)


def _begins_block(words: Sequence[str], dialect: str) -> bool:
    """Returns whether a statement with these first words contains statements of its own."""
    if words[0] == "CREATE":
        return words[-1] == "BEGIN" and not _ROUTINES.isdisjoint(words)
    if words[0] == "DECLARE" and dialect == SPARK:  # a variable
        return False
    return words[0] in _BLOCKS and len(words) == 2 and words[1] not in _TRANSACTIONS


def bind(texts: Sequence[str], params: Params, dialect: str, placeholder: str) -> list[BoundStatement]:
    """Returns the statements of the texts of a call, with the placeholders of a driver and their values in order.

    ``:name`` and ``%(name)s`` are parameters if a mapping has the name; ``$n``, ``?`` and ``%s`` are those of a list,
    the latter two counted through all texts. SQL with a psycopg placeholder has ``%%`` for ``%``.

    Args:
        placeholder: ``?``, or ``%s``, for which ``%`` is doubled in a statement with values.

    Raises:
        KeyError: with the name of a parameter beyond the list.
    """
    counter = iter(range(1, 1 << 62))
    pairs = [pair for text in texts for pair in split(text, dialect)]
    doubled = params and any(
        match["s"] or match["percent"] for text, spans in pairs for match in _places(text, spans, params)
    )
    return [_bound(text, spans, params, placeholder, counter, bool(doubled)) for text, spans in pairs]


def _bound(
    text: str, spans: Spans, params: Params, placeholder: str, counter: Iterator[int], doubled: bool
) -> BoundStatement:
    pieces: list[str] = []
    values: list[Any] = []
    at = 0
    for match in _places(text, spans, params) if params else ():
        pieces.append(text[at : match.start()])
        at = match.end()
        if isinstance(params, Mapping):
            values.append(params[match["name"] or match["percent"]])
            continue
        number = int(match["number"] or next(counter))
        if number > len(params):
            raise KeyError(f"${number}")
        values.append(params[number - 1])
    pieces.append(text[at:])
    if doubled:
        pieces = [piece.replace("%%", "%") for piece in pieces]
    if placeholder == "%s" and values:
        pieces = [piece.replace("%", "%%") for piece in pieces]
    return BoundStatement(placeholder.join(pieces), tuple(values))


def _places(text: str, spans: Spans, params: Params) -> Iterator[re.Match[str]]:
    """Yields the places of parameters: of known names, or of a list."""
    named = isinstance(params, Mapping)
    for start, end in spans:
        for match in _PLACE.finditer(text, start, end):
            name = match["name"] or match["percent"]
            if (name in params) if named else (name is None):
                yield match


_READS = re.compile(r"\s*\(*\s*(?:select|values|table|explain|show|describe|desc)\b", re.IGNORECASE)
_WITH = re.compile(r"\s*with\b", re.IGNORECASE)
_CHANGES = re.compile(r"\b(?:insert|update|delete|replace|merge|into)\b", re.IGNORECASE)
_OWN_TRANSACTION = re.compile(
    r"\s*(?:begin|start|commit|end|rollback|savepoint|release|vacuum|pragma|attach|detach|set\s+autocommit|xa)\b",
    re.IGNORECASE,
)


def only_reads(statement: str) -> bool:
    """Returns whether a statement only reads. A word such as ``update`` in quotes counts as a change."""
    reads = _READS.match(statement) or _WITH.match(statement)
    return reads is not None and _CHANGES.search(statement) is None


def needs_own_transaction(statement: str) -> bool:
    """Returns whether a statement controls transactions, or cannot run in one."""
    return _OWN_TRANSACTION.match(statement) is not None
