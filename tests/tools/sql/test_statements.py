"""Splitting and binding SQL text, and safe forms of template values."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.templates.environment import sql_identifier, sql_list, sql_literal
from noetl_dagster.tools.sql import statements
from noetl_dagster.tools.sql.statements import (
    BoundStatement,
    bind,
    needs_own_transaction,
    split_statements,
    without_percent,
)

FUNCTION = "create function f() returns int begin atomic select case when true then 1 end; select 2; end"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("select 1; select 2;", ("select 1", "select 2")),
        ("select ';' ; ;; -- only; a comment\n", ("select ';'",)),
        ("select 'it''s; ok'; select 2", ("select 'it''s; ok'", "select 2")),
        (r"select E'a\'; b', 'c\'; select 2", (r"select E'a\'; b', 'c\'", "select 2")),
        ('select ";" from "a;b"', ('select ";" from "a;b"',)),
        ("do $$ begin; end $$; select 1", ("do $$ begin; end $$", "select 1")),
        ("select $x$ $$ ; $y$ $x$; select 1", ("select $x$ $$ ; $y$ $x$", "select 1")),
        ("select 1 /* a; /* b; */ c; */; select 2", ("select 1 /* a; /* b; */ c; */", "select 2")),
        ("-- a;\nselect 1; /* ; */", ("-- a;\nselect 1",)),
        (
            f"{FUNCTION}; select 3",
            (FUNCTION, "select 3"),
        ),
        ("", ()),
    ],
)
def test_split_statements(script: str, expected: tuple[str, ...]) -> None:
    assert split_statements(script) == expected


def test_named_parameters_are_numbered_by_first_use() -> None:
    bound = bind("select :b::int, :a, ':a', :b, x[1:n] -- :a", {"a": 1, "b": 2})

    assert bound == BoundStatement("select $1::int, $2, ':a', $1, x[1:n] -- :a", (2, 1))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("a[x:n]", "a[x:n]"),
        ("a[1:n]", "a[1:n]"),
        ("a[b[1]:n]", "a[b[1]:n]"),
        ("a[f(x):n]", "a[f(x):n]"),
        ('a["x":n]', 'a["x":n]'),
        ("a[f(x, :n):n]", "a[f(x, $1):n]"),
        ("a[x: :n]", "a[x: $1]"),
        ("a[:n]", "a[$1]"),
        ("array[x, :n]", "array[x, $1]"),
        ("array[x+:n]", "array[x+$1]"),
        ("array[not :n]", "array[not $1]"),
        ("a[1], f(:n)", "a[1], f($1)"),
        ("a[x:n] + :n", "a[x:n] + $1"),
    ],
)
def test_the_end_of_a_slice_is_no_parameter(text: str, bound: str) -> None:
    assert bind(text, {"n": 5}) == BoundStatement(bound, (5,) if "$1" in bound else ())


def test_a_body_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = statements._open_bodies

    def recorded(plain: str, opened: int) -> int:
        read.append(plain)
        return original(plain, opened)

    monkeypatch.setattr(statements, "_open_bodies", recorded)
    script = f"create function f() returns int begin atomic {'select 1; ' * 1000} end; select 2"
    assert len(split_statements(script)) == 2
    assert sum(map(len, read)) <= len(script)


def test_numbered_parameters_are_renumbered_for_each_statement() -> None:
    assert bind("select $2, $2", ["x", "y"]) == BoundStatement("select $1, $1", ("y",))
    with pytest.raises(KeyError):
        bind("select $3", ["x", "y"])


@pytest.mark.parametrize(
    ("text", "params", "native"),
    [
        ("select %s, '%s', %s -- %s", [1, 2], "select $1, '%s', $2 -- %s"),
        (
            "select a %% 2 from t where n like 'x%%' and b = %s",
            [1],
            "select a % 2 from t where n like 'x%' and b = $1",
        ),
        ("select %(a)s::int, %(b)s, '%(a)s'", {"a": 1}, "select :a::int, %(b)s, '%(a)s'"),
        ("select 10 % 3, 'a%%'", [1], "select 10 % 3, 'a%%'"),
        ("select a %size, $1", [1], "select a %size, $1"),
        ("select 7 %s, $1", [1], "select 7 %s, $1"),
        ("select 7 %s", {"s": 1}, "select 7 %s"),
        ("select '%%', 5 %% 2, %s", [], "select '%%', 5 %% 2, %s"),
    ],
)
def test_percent_placeholders_are_clearly_some_or_left(text: str, params: Any, native: str) -> None:
    assert without_percent([text], params) == [native]


def test_percent_placeholders_are_counted_through_all_texts() -> None:
    assert without_percent(["select %s; select %s", "select %s"], "abc") == [
        "select $1; select $2",
        "select $3",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "VACUUM t",
        "/* x */ create database d",
        "call p()",
        "commit",
        "begin",
        "discard all",
        "cluster;",
        "cluster",
        "cluster verbose",
        "cluster (verbose);",
        "reindex schema s",
        "reindex index concurrently i",
        "alter table only t detach partition t_1 concurrently",
        "alter subscription s refresh publication",
        "alter subscription s set publication p",
    ],
)
def test_statements_outside_of_transactions(text: str) -> None:
    assert needs_own_transaction(text)


@pytest.mark.parametrize(
    "text",
    [
        "select 1",
        "create index i on t (a)",
        "with x as (select 1) select 1",
        "ending",
        "discard plans",
        "cluster t using i",
        "cluster verbose t",
        "reindex table t",
        "alter table t detach partition t_1",
        "alter subscription s owner to o",
    ],
)
def test_statements_inside_of_transactions(text: str) -> None:
    assert not needs_own_transaction(text)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(SCALARS, min_size=1, max_size=8))
async def test_literals_come_back_from_the_server_unchanged(pool: asyncpg.Pool, values: list[object]) -> None:
    row = await pool.fetchrow("SELECT " + ", ".join(f"{sql_literal(value)} AS c{n}" for n, value in enumerate(values)))

    for value, found in zip(values, row, strict=True):
        assert float(found) == value if isinstance(value, float) else found == value


async def test_no_content_breaks_out(pool: asyncpg.Pool) -> None:
    evil = "x'); drop table noetl.event; --\\'"

    for setting in ("on", "off"):
        async with pool.acquire() as connection:
            await connection.execute(f"SET standard_conforming_strings = {setting}")
            assert await connection.fetchval(f"SELECT {sql_literal(evil)}") == evil
    assert sql_identifier('a"; drop.b') == '"a""; drop"."b"'
    assert sql_list([1, "b", None]) == "(1, 'b', NULL)"
    assert sql_list([]) == "(NULL)"


def test_literals_refuse_what_sql_cannot_hold() -> None:
    for value in ("a\0b", object()):
        with pytest.raises(TemplateError):
            sql_literal(value)
    with pytest.raises(TemplateError):
        sql_identifier("a..b")
