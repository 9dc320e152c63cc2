"""SQL text: splits scripts into statements, binds parameters, and recognises statements that only read.

The scanner implements PostgreSQL's lexical structure (chapter 4.1 of its manual): string constants with doubled
quotes, ``E''`` strings with backslashes, quoted identifiers, dollar quotes, line and nested block comments.
DuckDB's is a subset of it. The tests compare it with PostgreSQL's own scanner.
"""

# Why a scanner of our own, here and not for other dialects (tools/sql/databases/binding.py):
# - pglast, PostgreSQL's parser, is GPL-3, which a package under Apache-2.0 cannot ask of its users; postgast has
#   the same parser under BSD, but is a young native library of one author: good enough to test against.
# - Neither splits the SQL of playbooks: the parser refuses :name, and the split by scanner cuts BEGIN ATOMIC
#   bodies and drops statements without a keyword, so that the server never reports its error.
# - duckdb.extract_statements refuses :name too, a script whose last statement needs what its first one loads,
#   and a PIVOT in DuckDB 1.4 (IndexError); duckdb.tokenize gives no comments before DuckDB 2.
# - sqlglot's scanner takes 30 us for a short statement (this one 10 us) and 0.5 s to import.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import Any

import asyncpg

_LETTER = r"[A-Za-z_\u0080-\U0010ffff]"
_WORD = rf"{_LETTER}[A-Za-z0-9_$\u0080-\U0010ffff]*+"
_PART = re.compile(
    rf"""
      (?P<TEXT> [^'"$\-/:;A-Za-z_\u0080-\U0010ffff]++ | (?![eE]'){_WORD} | :: )
    | (?P<QUOTED>
          [eE]'(?: [^'\\] | \\. | ''
                 | '(?:[ \t\f\v]|--[^\n\r]*+)*+[\n\r](?:\s|--[^\n\r]*+[\n\r])*+'  # continues in the next line
               )*+(?:'|\\?\Z)
        | '[^']*+(?:'|\Z)  # doubled quotes end one string and begin the next, with the same result
        | "[^"]*+(?:"|\Z)
        | (?P<DOLLARS> \$(?:{_LETTER}[A-Za-z0-9_\u0080-\U0010ffff]*+)?\$ )
      )
    | (?P<COMMENT> --[^\n\r]*+ | (?P<BLOCK> /\*) )
    | (?P<NAMED> :(?!(?i:[bex]'|u&['"])){_WORD})  # no constant with a prefix
    | (?P<NUMBERED> \$[1-9][0-9]*+)
    | (?P<END> ;)
    | (?P<OTHER> .)
    """,
    re.VERBOSE | re.DOTALL,
)
_BRACKETS = re.compile(r"[\[\]()]")
_OPERAND = re.compile(r"""[\w$)\]'"]\Z""")
"""The end of a value: a colon right after it, in brackets, is that of a slice."""

_NESTING = re.compile(r"/\*|\*/")
_CASE_OR_END = re.compile(r"\b(?:CASE|END)\b", re.IGNORECASE)
_SQL_BODY = re.compile(r"\bBEGIN\s+ATOMIC\b", re.IGNORECASE)

_OWN_TRANSACTION = re.compile(
    r"""\s*(?:
        VACUUM | CALL | CHECKPOINT | ALTER\s+SYSTEM | DISCARD\s+ALL
      | CLUSTER(?=(?:\s*\([^)]*\)|\s+VERBOSE)?\s*(?:;|$))
      | (?:CREATE|DROP)\s+(?:DATABASE|TABLESPACE|SUBSCRIPTION)
      | CREATE\s+(?:UNIQUE\s+)?INDEX\s+CONCURRENTLY | DROP\s+INDEX\s+CONCURRENTLY
      | REINDEX\s+(?:\([^)]*\)\s*)?(?:DATABASE|SYSTEM|SCHEMA|(?:TABLE|INDEX)\s+CONCURRENTLY)
      | REFRESH\s+MATERIALIZED\s+VIEW\s+CONCURRENTLY
      | ALTER\s+TYPE\s+\S+\s+ADD\s+VALUE
      | ALTER\s+TABLE\s[^;]*\sDETACH\s+PARTITION\s[^;]*\sCONCURRENTLY
      | ALTER\s+SUBSCRIPTION\s[^;]*\s(?:REFRESH|(?:SET|ADD|DROP)\s+PUBLICATION)
      | BEGIN | START\s+TRANSACTION | COMMIT | END | ROLLBACK | ABORT | SAVEPOINT | RELEASE
      | PREPARE\s+TRANSACTION
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)


class Part(Enum):
    """The kinds of parts of SQL text."""

    TEXT = "text"
    COMMENT = "comment"
    QUOTED = "quoted"
    NAMED = "named"
    NUMBERED = "numbered"
    END = "end"


_PARTS = {part.name: part for part in Part} | {"OTHER": Part.TEXT}


@dataclass(frozen=True, slots=True)
class BoundStatement:
    """A statement with parameters ``$1..$n`` and their values, in that order."""

    text: str
    values: tuple[Any, ...] = ()


def scan(sql: str) -> Iterator[tuple[Part, str]]:
    """Yields the parts of the text; their concatenation is the text."""
    at = 0
    while match := _PART.match(sql, at):
        part, end = _PARTS[match.lastgroup or ""], match.end()
        if part is Part.QUOTED and (dollars := match["DOLLARS"]):
            close = sql.find(dollars, end)
            end = len(sql) if close < 0 else close + len(dollars)
        elif part is Part.COMMENT and match["BLOCK"]:
            end = _comment_end(sql, end)
        yield part, sql[at:end]
        at = end


def _comment_end(sql: str, at: int) -> int:
    depth = 1
    while depth:
        mark = _NESTING.search(sql, at)
        if mark is None:
            return len(sql)
        depth += 1 if mark.group() == "/*" else -1
        at = mark.end()
    return at


@lru_cache(maxsize=128)
def split_statements(sql: str) -> tuple[str, ...]:
    """Returns the statements of a script, without their semicolons, and without empty ones and bare comments.

    The body of ``CREATE FUNCTION ... BEGIN ATOMIC ... END`` stays in one piece.
    """
    statements: list[str] = []
    current: list[str] = []
    words: list[str] = []  # the statement without comments and quoted parts, since its last semicolon
    is_empty, opened = True, 0

    def end_part() -> None:
        nonlocal is_empty, opened
        plain = "".join(words)
        is_empty = is_empty and not plain.strip()
        opened = _open_bodies(plain, opened)
        words.clear()

    def end_statement() -> None:
        nonlocal is_empty
        if not is_empty:
            statements.append("".join(current).strip())
        current.clear()
        is_empty = True

    for part, text in scan(sql):
        if part is Part.END:
            end_part()
            if not opened:
                end_statement()
                continue
        current.append(text)
        words.append(" " if part is Part.COMMENT else "?" if part is Part.QUOTED else text)
    end_part()
    end_statement()
    return tuple(statements)


def _open_bodies(plain: str, opened: int) -> int:
    """Returns how many ``BEGIN ATOMIC`` and ``CASE`` are open after a text of which ``opened`` were open before it."""
    if not opened:
        body = _SQL_BODY.search(plain)
        if body is None:
            return 0
        plain, opened = plain[body.end() :], 1
    for word in _CASE_OR_END.findall(plain):
        opened += 1 if word.upper() == "CASE" else -1
    return max(opened, 0)


@lru_cache(maxsize=128)
def needs_own_transaction(statement: str) -> bool:
    """Returns whether a statement cannot run inside a transaction block, or controls transactions itself."""
    plain = "".join(" " if part is Part.COMMENT else text for part, text in scan(statement))
    return _OWN_TRANSACTION.match(plain) is not None


def bind(statement: str, params: Mapping[str, Any] | Sequence[Any]) -> BoundStatement:
    """Replaces ``:name`` (mapping) or ``$n`` (list) by ``$1..$n`` of this statement alone.

    A ``:name`` that is no key of the mapping stays as it is, and so does the end of a slice, as in ``a[1:n]``: there,
    ``a[1: :n]`` is a parameter. A ``$n`` beyond the list is a ``KeyError`` with that argument.
    """
    if not params:
        return BoundStatement(statement)
    text, names = _placed(statement, frozenset(params) if isinstance(params, Mapping) else None)
    if isinstance(params, Mapping):
        return BoundStatement(text, tuple(params[name] for name in names))
    missing = next((name for name in names if int(name) > len(params)), None)
    if missing is not None:
        raise KeyError(f"${missing}")
    return BoundStatement(text, tuple(params[int(name) - 1] for name in names))


@lru_cache(maxsize=128)
def _placed(statement: str, names: frozenset[str] | None) -> tuple[str, tuple[str, ...]]:
    """Returns the statement with numbered parameters, and their names (or numbers) in order."""
    wanted = Part.NUMBERED if names is None else Part.NAMED
    places: dict[str, int] = {}
    pieces: list[str] = []
    opened: list[str] = []
    for part, text in scan(statement):
        if part is Part.TEXT:
            _follow(text, opened)
        name = text[1:]
        is_slice = part is Part.NAMED and opened[-1:] == ["["] and _OPERAND.search(pieces[-1]) is not None
        if part is wanted and (names is None or name in names) and not is_slice:
            pieces.append(f"${places.setdefault(name, len(places) + 1)}")
        else:
            pieces.append(text)
    return "".join(pieces), tuple(places)


def _follow(text: str, opened: list[str]) -> None:
    """Keeps the brackets that are open after a text."""
    for bracket in _BRACKETS.findall(text):
        if bracket in "[(":
            opened.append(bracket)
        elif opened:
            opened.pop()


_PLACE = re.compile(r"%(?:%|s(?![A-Za-z0-9_])|\(([A-Za-z_][A-Za-z0-9_]*)\)s(?![A-Za-z0-9_]))")
_PLAIN = frozenset({Part.TEXT, Part.END})


def without_percent(texts: Sequence[str], params: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """Rewrites psycopg's placeholders ``%s`` and ``%(name)s`` to ``$n`` and ``:name``.

    Only clear placeholders are rewritten: outside of quotes and comments, ``%s`` with a list and in SQL that has no
    ``$n``, ``%(name)s`` with a known name. ``%s`` are counted through all texts of a call. In SQL that has
    placeholders, ``%%`` becomes ``%``, in quotes too, as for psycopg; other SQL keeps every ``%``.
    """
    if not params or not any("%" in text for text in texts):
        return list(texts)
    named = isinstance(params, Mapping)
    if not named and any(part is Part.NUMBERED for text in texts for part, _ in scan(text)):
        return list(texts)
    count = 0

    def native(match: re.Match[str]) -> str:
        nonlocal count
        name = match[1]
        if match[0] == "%%":
            return "%"
        if (name not in params) if named else (name is not None):
            return match[0]
        count += 1
        return f":{name}" if named else f"${count}"

    rewritten = []
    for sql in texts:
        pieces = []
        for plain, group in groupby(scan(sql), key=lambda item: item[0] in _PLAIN):
            text = "".join(text for _, text in group)
            pieces.append(_PLACE.sub(native, text) if plain else text.replace("%%", "%"))
        rewritten.append("".join(pieces))
    return rewritten if count else list(texts)


_NAME = re.compile(r"[^\W\d]\w*")
_CHANGES = frozenset(
    {"insert", "update", "delete", "merge", "into", "share", "call", "do", "execute", "fetch", "move", "set"}
)
_READS = re.compile(r"\s*\(*\s*(?:select|with|values|table)\b", re.IGNORECASE)

_LISTS = re.compile(
    r"""\s* insert \s+ into \s+ [\w.]+ (?:\s+ as \s+ \w+)? \s* (?:\([^()]*\))? \s*
    (?:overriding \s+ \w+ \s+ value \s+)? values \b""",
    re.IGNORECASE | re.VERBOSE,
)
_CONFLICT = re.compile(r"\bon\s+conflict\b", re.IGNORECASE)
_CALL = re.compile(r"[\w$]\s*\(")

# functions that may have side effects, and views and foreign tables, which may call any
HAS_SIDE_EFFECTS = """
SELECT EXISTS (SELECT FROM pg_proc WHERE proname = ANY($1::text[]) AND provolatile = 'v')
    OR EXISTS (
        SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE relname = ANY($1::text[]) AND relkind IN ('v', 'f')
          AND nspname NOT IN ('pg_catalog', 'information_schema')
    )
"""


async def is_repeatable(connection: asyncpg.Connection, text: str) -> bool:
    """Returns whether a statement only reads: it names nothing that changes data or has side effects.

    Names are compared as words, so a column with the name of a volatile function counts too.
    """
    parts = list(scan(text))
    plain = "".join(part.lower() for kind, part in parts if kind in (Part.TEXT, Part.NUMBERED))
    quoted = "".join(part for kind, part in parts if kind is Part.QUOTED and part.startswith('"'))
    words = {*_NAME.findall(plain), *_NAME.findall(quoted)}
    if not _READS.match(plain) or words & _CHANGES:
        return False
    return not await connection.fetchval(HAS_SIDE_EFFECTS, list(words))


@lru_cache(maxsize=512)
def lists_rows(text: str) -> bool:
    """Returns whether a statement returns no more rows than it writes out: ``INSERT ... VALUES (...)``.

    A statement that calls a function may return more, as with ``VALUES (unnest($1))``.
    """
    shown = {Part.QUOTED: "x", Part.COMMENT: " "}
    plain = "".join(shown.get(kind, part) for kind, part in scan(text))
    match = _LISTS.match(plain)
    return match is not None and not _CALL.search(_CONFLICT.sub("", plain[match.end() :]))
