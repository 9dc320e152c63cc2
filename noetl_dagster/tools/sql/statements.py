"""SQL text: splitting a script into statements, and binding ``:name`` and ``$n`` parameters.

The scanner knows PostgreSQL's lexical structure (chapter 4.1 of its manual): string constants with doubled
quotes, ``E''`` strings with backslashes, quoted identifiers, dollar quotes, line and nested block comments.
DuckDB's is a subset of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

_DOLLAR_QUOTE = re.compile(r"\$(?:[A-Za-z_\x80-\uffff][A-Za-z0-9_\x80-\uffff]*)?\$")
_NAMED = re.compile(r":([A-Za-z_][A-Za-z0-9_]*)")
_NUMBERED = re.compile(r"\$([1-9][0-9]*)")
_NESTING = re.compile(r"/\*|\*/")
_PLAIN = re.compile(r"[^'\"$\-/:;A-Za-z_]+|[A-Za-z_\x80-\uffff][A-Za-z0-9_\x80-\uffff$]*")
_SQL_BODY = re.compile(r"\bBEGIN\s+ATOMIC\b", re.IGNORECASE)

_OWN_TRANSACTION = re.compile(
    r"""\s*(?:
        VACUUM | CALL | CHECKPOINT | ALTER\s+SYSTEM
      | (?:CREATE|DROP)\s+(?:DATABASE|TABLESPACE|SUBSCRIPTION)
      | CREATE\s+(?:UNIQUE\s+)?INDEX\s+CONCURRENTLY | DROP\s+INDEX\s+CONCURRENTLY
      | REINDEX\s+(?:\([^)]*\)\s*)?(?:DATABASE|SYSTEM|(?:TABLE|INDEX|SCHEMA)\s+CONCURRENTLY)
      | REFRESH\s+MATERIALIZED\s+VIEW\s+CONCURRENTLY
      | ALTER\s+TYPE\s+\S+\s+ADD\s+VALUE
      | BEGIN | START\s+TRANSACTION | COMMIT | END | ROLLBACK | ABORT | SAVEPOINT | RELEASE
      | PREPARE\s+TRANSACTION
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)


class Part(Enum):
    TEXT = "text"
    COMMENT = "comment"
    QUOTED = "quoted"
    NAMED = "named"
    NUMBERED = "numbered"
    END = "end"


@dataclass(frozen=True, slots=True)
class BoundStatement:
    """A statement with parameters ``$1..$n`` and the values for them, in that order."""

    text: str
    values: tuple[Any, ...] = ()


def scan(sql: str) -> Iterator[tuple[Part, str]]:
    """The text in parts whose concatenation is the text."""
    position, length = 0, len(sql)
    while position < length:
        part, end = _next_part(sql, position)
        yield part, sql[position:end]
        position = end


def _next_part(sql: str, at: int) -> tuple[Part, int]:
    character = sql[at]
    following = sql[at + 1 : at + 2]
    if character == "'":
        return Part.QUOTED, _quote_end(sql, at, "'")
    if character in "eE" and following == "'":
        return Part.QUOTED, _escape_string_end(sql, at + 1)
    if character == '"':
        return Part.QUOTED, _quote_end(sql, at, '"')
    if sql.startswith("--", at):
        end = sql.find("\n", at)
        return Part.COMMENT, len(sql) if end < 0 else end
    if sql.startswith("/*", at):
        return Part.COMMENT, _comment_end(sql, at)
    if character == "$":
        return _dollar(sql, at)
    if character == ":":
        if following == ":":  # a cast
            return Part.TEXT, at + 2
        named = _NAMED.match(sql, at)
        return (Part.NAMED, named.end()) if named else (Part.TEXT, at + 1)
    if character == ";":
        return Part.END, at + 1
    plain = _PLAIN.match(sql, at)
    return Part.TEXT, plain.end() if plain else at + 1


def _quote_end(sql: str, at: int, quote: str) -> int:
    """Doubled quotes end one string and begin the next, which comes to the same."""
    end = sql.find(quote, at + 1)
    return len(sql) if end < 0 else end + 1


def _escape_string_end(sql: str, at: int) -> int:
    position = at + 1
    while position < len(sql):
        if sql[position] == "\\":
            position += 2
        elif sql[position] == "'":
            return position + 1
        else:
            position += 1
    return len(sql)


def _comment_end(sql: str, at: int) -> int:
    depth, position = 1, at + 2
    while depth:
        mark = _NESTING.search(sql, position)
        if mark is None:
            return len(sql)
        depth += 1 if mark.group() == "/*" else -1
        position = mark.end()
    return position


def _dollar(sql: str, at: int) -> tuple[Part, int]:
    number = _NUMBERED.match(sql, at)
    if number is not None:
        return Part.NUMBERED, number.end()
    tag = _DOLLAR_QUOTE.match(sql, at)
    if tag is None:
        return Part.TEXT, at + 1
    end = sql.find(tag.group(), tag.end())
    return Part.QUOTED, len(sql) if end < 0 else end + len(tag.group())


@lru_cache(maxsize=128)
def split_statements(sql: str) -> tuple[str, ...]:
    """The statements of a script, without their semicolons; empty ones and bare comments are left out.

    The body of ``CREATE FUNCTION ... BEGIN ATOMIC ... END`` stays in one piece.
    """
    statements: list[str] = []
    current: list[str] = []
    words: list[str] = []  # the statement without comments and quoted parts
    for part, text in scan(sql):
        if part is Part.END and not _inside_sql_body("".join(words)):
            if "".join(words).strip():
                statements.append("".join(current).strip())
            current, words = [], []
            continue
        current.append(text)
        if part is not Part.COMMENT:
            words.append("?" if part is Part.QUOTED else text)
    if "".join(words).strip():
        statements.append("".join(current).strip())
    return tuple(statements)


def _inside_sql_body(statement: str) -> bool:
    body = _SQL_BODY.search(statement)
    if body is None:
        return False
    words = re.findall(r"\b(?:CASE|END)\b", statement[body.end() :], re.IGNORECASE)
    depth = 1
    for word in words:
        depth += 1 if word.upper() == "CASE" else -1
    return depth > 0


def without_comments(sql: str) -> str:
    return "".join(" " if part is Part.COMMENT else text for part, text in scan(sql)).strip()


@lru_cache(maxsize=128)
def needs_own_transaction(statement: str) -> bool:
    """Whether a statement must not run inside a transaction block, or steers transactions itself."""
    return _OWN_TRANSACTION.match(without_comments(statement)) is not None


def bind(statement: str, params: Mapping[str, Any] | Sequence[Any]) -> BoundStatement:
    """Replaces ``:name`` (mapping) or ``$n`` (list) by ``$1..$n`` of this statement alone.

    A ``:name`` that is no key of the mapping stays as it is, so that array slices ``a[1:n]`` work.

    Raises:
        KeyError: for a ``$n`` beyond the list; its argument is ``$n``.
    """
    if not params:
        return BoundStatement(statement)
    text, names = _placed(statement, frozenset(params) if isinstance(params, Mapping) else None)
    if isinstance(params, Mapping):
        return BoundStatement(text, tuple(params[name] for name in names))
    values: list[Any] = []
    for name in names:
        index = int(name) - 1
        if index >= len(params):
            raise KeyError(f"${name}")
        values.append(params[index])
    return BoundStatement(text, tuple(values))


@lru_cache(maxsize=128)
def _placed(statement: str, known: frozenset[str] | None) -> tuple[str, tuple[str, ...]]:
    """The statement with numbered places, and the names (or numbers) that belong to them in order."""
    wanted = Part.NUMBERED if known is None else Part.NAMED
    places: dict[str, int] = {}
    pieces: list[str] = []
    for part, text in scan(statement):
        name = text[1:]
        if part is wanted and (known is None or name in known):
            pieces.append(f"${places.setdefault(name, len(places) + 1)}")
        else:
            pieces.append(text)
    return "".join(pieces), tuple(places)
