"""Column lineage of Spark SQL steps."""

from __future__ import annotations

import pytest
from dagster import AssetKey, DagsterInstance

from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions
from tests.definitions import definitions_of
from tests.playbooks import playbook

pytestmark = pytest.mark.spark

FLOW = """
workflow:
  - step: start
    tool: {kind: duckdb, as: table, command: "SELECT 1 AS id, 'a' AS Who, 2.5 AS amount"}
    next: [totals]
  - step: totals
    tool:
      kind: spark
      from: {raw: start}
      sql: |
        CREATE OR REPLACE TEMPORARY VIEW twice AS SELECT *, amount * 2 AS twice FROM raw;
        SELECT who AS Customer, sum(twice) AS total, count(*), `max`(ID) AS `last id` FROM twice GROUP BY 1
    next: [frame]
  - step: frame
    tool: {kind: spark, from: [totals], code: "def main(totals): return totals"}
    next: [again]
  - step: again
    tool: {kind: spark, from: [frame], input: {rows: "{{ start.ref }}"}, sql: "SELECT f.total, r.id FROM frame f, rows r"}
"""


def test_spark_sql_shows_what_its_columns_are_made_of(
    settings: Settings, sessions: SparkSessions, dagster_instance: DagsterInstance
) -> None:
    sessions.get()
    try:
        definitions = definitions_of([playbook(FLOW)], EngineProvider(settings))
        assert definitions.resolve_job_def("sample").execute_in_process(instance=dagster_instance).success
    finally:
        close_engines()

    def lineage(step: str) -> dict[str, list[str]] | None:
        event = dagster_instance.get_latest_materialization_event(AssetKey(["tests", "sample", step]))
        assert event is not None
        assert event.asset_materialization is not None
        found = event.asset_materialization.metadata.get("dagster/column_lineage")
        if found is None:
            return None
        deps = found.value.deps_by_column.items()
        return {name: [f"{one.asset_key.path[-1]}.{one.column_name}" for one in sources] for name, sources in deps}

    assert lineage("totals") == {
        "Customer": ["start.Who"],
        "total": ["start.amount"],
        "last id": ["start.id"],
    }
    shown = dagster_instance.get_latest_materialization_event(AssetKey(["tests", "sample", "totals"]))
    assert shown is not None
    assert shown.asset_materialization is not None
    columns = shown.asset_materialization.metadata["dagster/column_schema"].value.columns
    assert {one.name: one.description for one in columns}["Customer"] == "from tests/sample/start: Who"
    assert lineage("frame") is None, "what a function does with a DataFrame is not known"
    assert lineage("again") == {"total": ["frame.total"], "id": ["start.id"]}
