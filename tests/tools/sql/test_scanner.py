"""The scanner of SQL text, held against PostgreSQL's own scanner and against the server."""

from __future__ import annotations

from itertools import zip_longest

import asyncpg
import postgast
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from postgast.pg_query_pb2 import Token

from noetl_dagster.tools.sql.statements import Part, scan, split_statements

pytestmark = pytest.mark.long

QUOTES = ["'", "''", '"', "E'", "e'", "U&'", "B'", "\\", "\\'", "$$", "$a$", "$é$", "$", *"-/"]
COMMENTS = ["--", "/*", "*/", "\n", "\r"]
MARKS = [":", "::", ":n", ":é", ":=", ";", "$1", "?", "?|", "->>", "@>", "%s", "%(n)s", "#", "`", *"()[]{}"]
WORDS = ["x", "é", "𝔸", "_", "1", "1e5", "n", "name", "\t", " "]
TEXTS = st.lists(st.sampled_from(QUOTES + COMMENTS + MARKS + WORDS), max_size=12).map("".join)

SEMICOLON, COLON, PARAMETER = map(Token.Value, ("ASCII_59", "ASCII_58", "PARAM"))


def places_of(sql: str) -> list[tuple[Part, int, int]]:
    """Semicolons, ``$n`` and ``:name`` outside of quotes and comments, by their places in bytes."""
    found, at = [], 0
    for part, text in scan(sql):
        end = at + len(text.encode())
        if part in (Part.END, Part.NUMBERED, Part.NAMED):
            found.append((part, at, end))
        at = end
    return found


def places_of_postgres(sql: str) -> list[tuple[Part, int, int]] | None:
    """The same as PostgreSQL's scanner sees them; None for text that it refuses."""
    try:
        tokens = postgast.scan(sql).tokens
    except postgast.PgQueryError:
        return None
    found = []
    data = sql.encode()
    for token, following in zip_longest(tokens, tokens[1:]):
        if token.token == SEMICOLON:
            found.append((Part.END, token.start, token.end))
        elif token.token == PARAMETER and data[token.start + 1 : token.start + 2] != b"0":
            found.append((Part.NUMBERED, token.start, token.end))
        elif token.token == COLON and following is not None and following.start == token.end:
            word = data[following.start : following.end].decode()
            if (word[0].isalpha() or word[0] == "_" or word[0] > "\x7f") and word[-1] not in "'\"":
                found.append((Part.NAMED, token.start, following.end))
    return found


@settings(max_examples=600, deadline=None)
@given(TEXTS)
@example("é$$;")
@example(":n$$;$$")
@example("--\r;")
@example("E'a'\n'b\\';c';")
@example("E'a' -- c\n'b\\';c';")
@example(":E'\\';';")
@example(":U&'n';")
def test_the_scanner_sees_what_that_of_postgres_sees(sql: str) -> None:
    expected = places_of_postgres(sql)
    if expected is not None:
        assert places_of(sql) == expected


@settings(max_examples=250, deadline=None)
@given(TEXTS)
def test_splitting_and_joining_loses_nothing(sql: str) -> None:
    assert "".join(text for _, text in scan(sql)) == sql
    end = 0
    gaps = []
    for statement in split_statements(sql):
        assert statement == statement.strip() != ""
        start = sql.index(statement, end)
        gaps.append(sql[end:start])
        end = start + len(statement)
    gaps.append(sql[end:])
    for part, text in (found for gap in gaps for found in scan(gap)):
        assert part in (Part.END, Part.COMMENT) or not text.strip()


@pytest.mark.parametrize(
    "text", ["select 'a; b", "select /* a; b", "select $x$ a; b", 'select "a; b', "sele ct", "{{ x }}"]
)
async def test_text_that_no_scanner_understands_reaches_the_server(pool: asyncpg.Pool, text: str) -> None:
    statements = split_statements(f"select 1; {text}")

    assert statements == ("select 1", text)
    with pytest.raises(asyncpg.PostgresSyntaxError) as caught:
        await pool.fetch(statements[1])
    assert caught.value.sqlstate == "42601"


@pytest.mark.parametrize("text", ["'" * 50_000, "E'\\" * 20_000, "/*" * 50_000, "$a$b" * 20_000, "E'a'\n" * 20_000])
def test_scanning_is_linear(text: str) -> None:
    assert sum(len(part) for _, part in scan(text)) == len(text)
