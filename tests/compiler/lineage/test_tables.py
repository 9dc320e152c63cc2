"""The tables that steps write, by a look at their text."""

from __future__ import annotations

from pathlib import Path

import pytest

from noetl_dagster.compiler.lineage.tables import (
    FolderWriters,
    PlaybookWriters,
    WrittenTable,
    rendered_text,
    tables_written,
)
from tests.playbooks import playbook, text_of


def written(tool: str, head: str = "workload: {schema: shop, pg: work, n: 3}") -> list[tuple[str, str | None, str]]:
    flow = playbook(f"{head}\nworkflow:\n  - step: start\n    tool: {tool}\n")
    return [(one.kind, one.where, one.name) for one in tables_written(flow, flow.step("start"))]


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("INSERT INTO Shop.Orders (id) SELECT 1", ["shop.orders"]),
        ('insert into \\"Shop\\".orders values (1)', ["Shop.orders"]),
        ("INSERT INTO {{ schema }}.orders SELECT {{ n }}", ["shop.orders"]),
        ("INSERT INTO {{ unknown }}.orders SELECT 1", []),
        ("CREATE TABLE IF NOT EXISTS orders AS SELECT 1", ["orders"]),
        ("CREATE TABLE orders (id int)", []),
        ("MERGE INTO orders USING new ON true WHEN NOT MATCHED THEN INSERT VALUES (1)", ["orders"]),
        ("CREATE TEMP TABLE t (a int); INSERT INTO t SELECT 1", []),
        ("SELECT 'INSERT INTO a' -- INSERT INTO b", []),
        ("{% if n %}INSERT INTO a SELECT 1{% endif %}", []),
        ("SELECT a INTO b FROM c", []),
    ],
)
def test_statements_that_fill_tables(sql: str, tables: list[str]) -> None:
    tool = f'{{kind: postgres, auth: "{{{{ pg }}}}", command: "{sql}"}}'
    assert written(tool) == [("postgres", "work", name) for name in tables]


def test_sinks_and_transfers_write_tables() -> None:
    sink = "{kind: python, code: 'result = 1', sink: {tool: {kind: postgres, auth: pg_b, table: public.Rows}}}"
    assert written(sink) == [("postgres", "pg_b", "public.Rows")]
    target = "{kind: postgres, table: lake.rows}"
    assert written(f"{{kind: transfer, source: {{kind: object, path: a.csv}}, target: {target}}}") == [
        ("postgres", "", "lake.rows")
    ]


def test_tables_are_of_a_database() -> None:
    assert written("{kind: postgres, auth: '{{ ctx.a }}', command: CREATE TABLE t AS SELECT 1}") == [
        ("postgres", None, "t")
    ]
    (found,) = written("{kind: duckdb, database: lake.duckdb, command: CREATE TABLE t AS SELECT 1}")
    assert found == ("duckdb", str(Path("lake.duckdb").absolute()), "t")
    assert written("{kind: duckdb, command: CREATE TABLE t AS SELECT 1}") == [("duckdb", None, "t")]


def test_templates_of_identifiers_are_filled_in_and_others_marked() -> None:
    known = {"schema": "shop", "day": "2026-01-01", "name": 'a"b'}
    sql = "SELECT '{{ day }}' {# a note #} FROM {{ schema }}.t, {{ schema | sql_identifier }}.u WHERE x = {{ ctx.y }}"
    assert rendered_text(sql, known) == ("SELECT 'noetl_value'  FROM shop.t, \"shop\".u WHERE x = noetl_value")
    assert rendered_text("{% for x in y %}a{% endfor %}", known) is None


WRITER = """
    workflow:
      - step: start
        asset: {key: lake/orders}
        tool: {kind: postgres, auth: work, command: "CREATE TABLE lake.orders AS SELECT 1 AS id"}
"""


def test_who_writes_a_table(tmp_path: Path) -> None:
    table = WrittenTable("postgres", "work", "lake.orders")
    one = playbook(WRITER, "one")
    observer = playbook(
        "dagster: {observe: [{asset: shop/orders, table: Public.orders, auth: work}]}\n"
        "workflow:\n  - {step: start, tool: {kind: noop}}\n"
    )
    together = PlaybookWriters([one, observer])
    assert list(together(table)) == [("lake", "orders")]
    assert list(together(WrittenTable("postgres", "work", "public.orders"))) == [("shop", "orders")]
    assert list(together(WrittenTable("postgres", "other", "lake.orders"))) == [], "another database may have one too"
    (tmp_path / "one.yaml").write_text(text_of("one", WRITER))
    (tmp_path / "broken.yaml").write_text("kind: Playbook\nlake.orders: [\n")
    in_folder = FolderWriters(tmp_path, observer)
    assert list(in_folder(table)) == [("lake", "orders")]
    assert list(in_folder(WrittenTable("postgres", "work", "public.orders"))) == [("shop", "orders")]
