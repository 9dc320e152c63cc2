"""Columns of SQL down to the columns of tables, for the shapes that SQL has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from noetl_dagster.compiler.lineage.columns import LONGEST, Script, script_of


def plain(columns: Any) -> Any:
    """``{"total": "orders.amount, orders.tax"}``, which reads easily."""
    if columns is None:
        return None
    return {name: ", ".join(sorted(".".join(one) for one in found)) for name, found in columns.items()}


def read(
    sql: str,
    dialect: str = "postgres",
    rows: Sequence[str] | None = None,
    **known: Sequence[str],
) -> Script:
    return script_of(sql, dialect, known, rows)


def selected(sql: str, dialect: str = "postgres", rows: Sequence[str] | None = None, **known: Any) -> Any:
    return plain(read(sql, dialect, rows, **known).result)


def filled(sql: str, dialect: str = "postgres", **known: Any) -> Any:
    return {name: plain(columns) for name, columns in read(sql, dialect, **known).tables.items()}


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("SELECT id, amount * 2 AS double FROM orders", {"id": "orders.id", "double": "orders.amount"}),
        (
            "SELECT o.id, c.name AS who FROM orders o JOIN customers AS c ON c.id = o.customer",
            {"id": "orders.id", "who": "customers.name"},
        ),
        (
            "WITH a AS (SELECT id, amount FROM orders), b AS (SELECT id, sum(amount) AS total FROM a GROUP BY id) "
            "SELECT b.id, b.total FROM b",
            {"id": "orders.id", "total": "orders.amount"},
        ),
        ("SELECT id FROM a UNION ALL SELECT other FROM b", {"id": "a.id, b.other"}),
        ("SELECT x, y FROM a EXCEPT SELECT p, q FROM b", {"x": "a.x, b.p", "y": "a.y, b.q"}),
        (
            "SELECT sum(v) FILTER (WHERE k = 'a') AS s, count(DISTINCT w) AS n, count(*) AS rows FROM t",
            {"s": "t.k, t.v", "n": "t.w", "rows": ""},
        ),
        (
            "SELECT row_number() OVER (PARTITION BY who ORDER BY at DESC) AS place FROM t",
            {"place": "t.at, t.who"},
        ),
        ("SELECT x FROM (SELECT y AS x FROM (SELECT z AS y FROM t) AS p) AS q", {"x": "t.z"}),
        (
            "SELECT (SELECT max(b.x) FROM b WHERE b.id = a.id) AS most, a.y FROM a",
            {"most": "b.x", "y": "a.y"},
        ),
        (
            "SELECT CASE WHEN state = 'paid' THEN amount END AS paid, coalesce(note, 'none') AS note FROM t",
            {"paid": "t.amount, t.state", "note": "t.note"},
        ),
        (
            'SELECT T."Order Id", "Größe" AS size FROM "Sales"."Orders" AS T',
            {"Order Id": "Sales.Orders.Order Id", "size": "Sales.Orders.Größe"},
        ),
        ("SELECT Shop.Orders.ID FROM Shop.Orders", {"id": "shop.orders.id"}),
        ("SELECT a.id FROM shop.orders a JOIN lake.orders b USING (id)", {"id": "shop.orders.id"}),
        ("SELECT a, lower(b) AS c FROM t GROUP BY 1, c", {"a": "t.a", "c": "t.b"}),
        ("SELECT a AS b, b AS a FROM t", {"b": "t.a", "a": "t.b"}),
        ("SELECT DISTINCT ON (id) id, v FROM t ORDER BY id, at DESC", {"id": "t.id", "v": "t.v"}),
        ("SELECT u.name FROM t, unnest(t.names) AS u(name)", {"name": "t.names"}),
        ("SELECT $1::int AS day, id FROM t WHERE id = $2 AND n = %(n)s", {"day": "", "id": "t.id"}),
        (
            "WITH RECURSIVE r AS (SELECT id, above FROM n UNION ALL SELECT n.id, n.above FROM n JOIN r ON "
            "n.above = r.id) SELECT id FROM r",
            {"id": "n.id"},
        ),
        ("SELECT a FROM s.t; SELECT b FROM s.u", {"b": "s.u.b"}),
    ],
)
def test_what_is_selected(sql: str, columns: Mapping[str, str]) -> None:
    assert selected(sql) == columns


def test_a_star_is_what_the_table_has() -> None:
    assert selected("SELECT *, a + b AS c FROM t", t=["a", "b"]) == {"a": "t.a", "b": "t.b", "c": "t.a, t.b"}
    assert selected("SELECT l.*, r.x FROM l JOIN r USING (id)", l=["id", "y"], r=["id", "x"]) == {
        "id": "l.id",
        "y": "l.y",
        "x": "r.x",
    }
    assert selected("FROM t", "duckdb", t=["a", "b"]) == {"a": "t.a", "b": "t.b"}
    assert selected("SELECT * EXCLUDE (a) FROM t", "duckdb", t=["a", "b"]) == {"b": "t.b"}


def test_a_star_of_one_unknown_table_is_what_the_rows_have() -> None:
    assert selected("SELECT * FROM t", rows=["a", "b"]) == {"a": "t.a", "b": "t.b"}
    assert selected("SELECT * FROM l JOIN r ON true", rows=["a", "b"]) == {}, "of which table, nobody can tell"
    assert selected("SELECT * EXCLUDE (a) FROM t", "duckdb", rows=["b"]) == {}
    assert selected("SELECT * FROM t") == {}


def test_a_column_behind_a_star_is_known_by_its_name() -> None:
    through = "WITH a AS (SELECT * FROM t) SELECT a.id, a.x + 1 AS y FROM a"
    assert selected(through) == {"id": "t.id", "y": "t.x"}
    several = "WITH a AS (SELECT * FROM l JOIN r ON true) SELECT a.id FROM a"
    assert selected(several) == {"id": ""}
    branches = "WITH a AS (SELECT * FROM l UNION ALL SELECT * FROM r) SELECT id FROM a"
    assert selected(branches) is None
    assert selected(branches, l=["x", "id"], r=["y", "id"]) is None, "columns meet by their place"
    named = "WITH p AS (SELECT * FROM l), q AS (SELECT * FROM r) SELECT p.id FROM p UNION SELECT q.x FROM q"
    assert selected(named) == {"id": "l.id, r.x"}


def test_a_star_says_nothing_of_places() -> None:
    """Rows that pass through JSON may come in another order."""
    rows = ["a", "b", "n"]
    assert selected("SELECT *, count(*) OVER () AS n FROM t", rows=rows, t=["b", "a"]) == {
        "a": "t.a",
        "b": "t.b",
        "n": "",
    }
    assert selected("SELECT q.x FROM (SELECT * FROM t) AS q(x, y)", t=["a", "b"]) is None
    assert selected("WITH q(x, y) AS (SELECT * FROM t) SELECT x FROM q", t=["a", "b"]) is None
    assert selected("SELECT q.x FROM t AS q(x, y)", t=["a", "b"]) is None
    assert filled("INSERT INTO u (x, y) SELECT * FROM t", t=["a", "b"]) == {"u": {}}
    assert filled("CREATE TABLE u (x, y) AS SELECT * FROM t", t=["a", "b"]) == {"u": {}}
    assert filled("CREATE TABLE u AS SELECT * FROM t", t=["a", "b"]) == {"u": {"a": "t.a", "b": "t.b"}}


def test_what_cannot_be_told_is_left_out() -> None:
    assert selected("SELECT a FROM l, r") == {"a": ""}, "a column of either table"
    assert selected("SELECT a FROM l, r", l=["a"], r=["b"]) == {"a": "l.a"}
    assert selected("SELECT (SELECT x FROM b) AS x FROM a") is None, "x may be of the outer table"
    assert selected("SELECT t FROM t") == {"t": ""}, "a whole row"
    assert selected("SELECT a FROM t", t=["b"]) == {"a": ""}
    assert selected("SELECT r.a FROM jsonb_to_recordset(:rows) AS r(a text)") == {"a": ""}
    assert selected("SELECT a FROM read_parquet('x.parquet')", "duckdb") == {"a": ""}
    assert selected("SELECT a FROM l UNION BY NAME SELECT a FROM r", "duckdb") is None
    for other in ("not sql at all (((", "VACUUM t", "EXPLAIN SELECT a FROM t", "COPY t FROM 'x'", ""):
        assert read(other) == Script(), other
    assert read(f"SELECT a FROM t WHERE b IN ({'1, ' * LONGEST}1)") == Script()


def test_what_a_template_stands_for_is_no_column() -> None:
    sql = "SELECT noetl_value AS day, a + noetl_value AS b, c AS noetl_value FROM t LIMIT noetl_value"
    assert selected(sql) == {"day": "", "b": "t.a"}
    assert selected("SELECT x.a FROM noetl_value AS x") == {"a": ""}
    assert selected("SELECT a FROM t_noetl_value") == {"a": ""}


def test_results_have_the_names_that_their_rows_have() -> None:
    assert selected("SELECT count(*), max(id) FROM t", rows=["count", "max"]) == {"count": "", "max": "t.id"}
    assert selected("SELECT count(*), max(id) FROM t") == {}
    assert selected('SELECT Id, "TOTAL" AS Total FROM Orders', "duckdb", ["Id", "Total"], orders=["ID", "Total"]) == {
        "Id": "orders.ID",
        "Total": "orders.Total",
    }


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        (
            "INSERT INTO daily (day, n) SELECT at::date, count(*) FROM visits GROUP BY 1",
            {"daily": {"day": "visits.at", "n": ""}},
        ),
        (
            "WITH v AS (SELECT at, x FROM visits) INSERT INTO s.daily (day, x) SELECT at, sum(x) FROM v GROUP BY 1 "
            "ON CONFLICT (day) DO UPDATE SET x = EXCLUDED.x",
            {"s.daily": {"day": "visits.at", "x": "visits.x"}},
        ),
        ("CREATE TABLE t AS SELECT a, b AS c FROM s.u", {"t": {"a": "s.u.a", "c": "s.u.b"}}),
        ("CREATE TABLE t (x, y) AS SELECT a, b FROM u", {"t": {"x": "u.a", "y": "u.b"}}),
        (
            "INSERT INTO t (a) SELECT x FROM u; INSERT INTO t (a, b) SELECT y, z FROM v",
            {"t": {"a": "u.x, v.y", "b": "v.z"}},
        ),
        (
            "CREATE TABLE t (a int, b text); INSERT INTO t SELECT x, y FROM u",
            {"t": {"a": "u.x", "b": "u.y"}},
        ),
        ("INSERT INTO t SELECT x FROM u", {"t": {}}),
        ("INSERT INTO t (a) VALUES (1)", {}),
        ("CREATE TABLE IF NOT EXISTS t (a int); INSERT INTO t SELECT x FROM u", {"t": {}}),
        ("WITH gone AS (DELETE FROM a RETURNING id) INSERT INTO t (id) SELECT id FROM gone", {"t": {}}),
    ],
)
def test_tables_that_are_filled(sql: str, tables: dict[str, dict[str, str]]) -> None:
    assert filled(sql) == tables


def test_what_a_script_makes_itself_is_looked_through() -> None:
    sql = """
        CREATE TEMP TABLE step AS SELECT id, amount FROM orders;
        CREATE VIEW seen AS SELECT id AS number, amount FROM step;
        INSERT INTO totals (number, total) SELECT number, sum(amount) FROM seen GROUP BY 1;
        SELECT * FROM totals
    """
    assert filled(sql) == {"totals": {"number": "orders.id", "total": "orders.amount"}}
    assert selected(sql, rows=["number", "total"]) == {"number": "orders.id", "total": "orders.amount"}


def test_a_table_that_is_made_anew_has_only_its_new_columns() -> None:
    assert filled("CREATE OR REPLACE TABLE z AS SELECT a c FROM t; CREATE OR REPLACE TABLE z AS SELECT k c FROM w") == {
        "z": {"c": "w.k"}
    }
    assert filled("CREATE TABLE z AS SELECT a c FROM t; DROP TABLE z; CREATE TABLE z AS SELECT k c FROM w") == {
        "z": {"c": "w.k"}
    }
    emptied = "CREATE TABLE z AS SELECT a c FROM t; TRUNCATE TABLE z; INSERT INTO z (c) SELECT k FROM w"
    assert filled(emptied) == {"z": {"c": "w.k"}}


def test_spark_sql() -> None:
    assert selected("SELECT `my col` AS c, explode(items) AS item FROM `lake`.`rows`", "spark") == {
        "c": "lake.rows.my col",
        "item": "lake.rows.items",
    }
    assert selected("SELECT t.Point.x AS x FROM t", "spark", t=["Point"]) == {"x": "t.Point"}
    assert filled("CREATE TABLE lake.day USING parquet AS SELECT a, b AS c FROM rows", "spark") == {
        "lake.day": {"a": "rows.a", "c": "rows.b"}
    }
    assert filled("INSERT OVERWRITE TABLE lake.day (a) SELECT x FROM rows", "spark") == {"lake.day": {"a": "rows.x"}}
