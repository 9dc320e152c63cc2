"""What the text of a statement says of its rows: whether they can be asked for twice, and whether they are few."""

from __future__ import annotations

import re
from functools import lru_cache

import asyncpg

from noetl_dagster.tools.sql.statements import Part, scan

_WORD = re.compile(r"[^\W\d]\w*")
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

# functions that may do something, and views and foreign tables, behind which there may be any
MAY_DO_SOMETHING = """
SELECT EXISTS (SELECT FROM pg_proc WHERE proname = ANY($1::text[]) AND provolatile = 'v')
    OR EXISTS (
        SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE relname = ANY($1::text[]) AND relkind IN ('v', 'f')
          AND nspname NOT IN ('pg_catalog', 'information_schema')
    )
"""


async def is_repeatable(connection: asyncpg.Connection, text: str) -> bool:
    """Whether a statement only reads: it names nothing that changes data or that may do something by itself.

    Names are compared as words, so that a column that is called as a volatile function is counts too.
    """
    plain = "".join(part.lower() for kind, part in scan(text) if kind in (Part.TEXT, Part.NUMBERED))
    quoted = "".join(part for kind, part in scan(text) if kind is Part.QUOTED and part.startswith('"'))
    words = {*_WORD.findall(plain), *_WORD.findall(quoted)}
    if not _READS.match(plain) or words & _CHANGES:
        return False
    return not await connection.fetchval(MAY_DO_SOMETHING, list(words))


@lru_cache(maxsize=512)
def lists_rows(text: str) -> bool:
    """Whether a statement returns no more rows than it writes out: ``INSERT ... VALUES (...)``.

    One that calls a function counts as one that may return more, as with ``VALUES (unnest($1))``.
    """
    parts = (
        "x" if kind is Part.QUOTED else " " if kind is Part.COMMENT else part for kind, part in scan(text)
    )
    plain = "".join(parts)
    found = _LISTS.match(plain)
    return found is not None and not _CALL.search(_CONFLICT.sub("", plain[found.end() :]))
