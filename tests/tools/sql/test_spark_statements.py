"""Splitting scripts of Spark SQL, whose quotes are not those of PostgreSQL."""

from __future__ import annotations

import pytest

from noetl_dagster.tools.spark.inputs import split_spark_statements

SCRIPT = "BEGIN DECLARE n INT; SET n = 1; SELECT n; END"


@pytest.mark.parametrize(
    ("script", "statements"),
    [
        ("select 1", ["select 1"]),
        ("select 1; select 2;", ["select 1", "select 2"]),
        ("declare n int; select n", ["declare n int", "select n"]),
        (r"select 'it\'s; ok'; select 2", [r"select 'it\'s; ok'", "select 2"]),
        (r"select 'a\\'; select 2", [r"select 'a\\'", "select 2"]),
        (r'select "it\"s; ok"; select 2', [r'select "it\"s; ok"', "select 2"]),
        ("select 'it''s; ok'; select 2", ["select 'it''s; ok'", "select 2"]),
        ("select `a;b`; select 2", ["select `a;b`", "select 2"]),
        (r"select r'\'; select 2", [r"select r'\'", "select 2"]),
        ("create function f() as $$ a;b $$; select 2", ["create function f() as $$ a;b $$", "select 2"]),
        (
            "create function f() as $x$ a;$$ $x$; select 2",
            ["create function f() as $x$ a;$$ $x$", "select 2"],
        ),
        ("select 1 /* a; /* b; */ c; */; select 2", ["select 1 /* a; /* b; */ c; */", "select 2"]),
        ("-- a;\nselect 1; /* ; */ ;; -- b", ["-- a;\nselect 1"]),
        ("select 'é;', :n; select ${x}", ["select 'é;', :n", "select ${x}"]),
        ("set a.b = x; show tables like 'a;b'", ["set a.b = x", "show tables like 'a;b'"]),
        (SCRIPT, [SCRIPT]),
        (f"select 1;\n{SCRIPT};", ["select 1", f"{SCRIPT};"]),
        ("select 'a; select 2", ["select 'a; select 2"]),
        (" ; ", []),
        ("", []),
    ],
)
def test_split_spark_statements(script: str, statements: list[str]) -> None:
    assert split_spark_statements(script) == statements
