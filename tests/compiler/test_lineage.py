"""Column lineage on the materialisations of steps, from step to step and from playbook to playbook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dagster import AssetKey, AssetMaterialization, DagsterInstance

from noetl_dagster.code_location.launch import launch
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from tests.definitions import definitions_of
from tests.playbooks import playbook, text_of

FLOW = """
workload: {schema: lake, pg: embedded}
workflow:
  - step: start
    asset: {key: lake/orders}
    tool:
      kind: postgres
      auth: "{{ pg }}"
      command: |
        CREATE SCHEMA IF NOT EXISTS lake;
        CREATE TABLE lake.raw AS SELECT 1 AS id, 'a' AS who, 10 AS amount;
        SELECT id, who AS customer, amount FROM {{ schema }}.raw
    next: [plumbing]
  - step: plumbing
    asset: false
    tool: {kind: duckdb, input: {o: "{{ start.rows }}"}, command: "SELECT *, amount * 2 AS twice FROM o"}
    next: [totals]
  - step: totals
    tool:
      kind: duckdb
      as: table
      input: {rows: "{{ plumbing.rows }}", orders: "{{ start.rows }}", n: "{{ start.rows | length }}"}
      command: |
        WITH per AS (SELECT customer, sum(twice) AS total FROM rows GROUP BY 1)
        SELECT p.customer AS "Who", p.total, count(*) AS n, :day AS day FROM per p GROUP BY ALL
      params: {day: today}
    next: [kept]
  - step: kept
    asset: {key: lake/daily}
    tool:
      kind: postgres
      auth: embedded
      command: |
        CREATE TABLE lake.daily (day text, most bigint);
        INSERT INTO lake.daily (day, most) SELECT who, max(amount) FROM lake.raw GROUP BY 1
"""
READER = """
workflow:
  - step: start
    from: {source: lake/orders}
    tool:
      - name: both
        kind: duckdb
        as: table
        input: {o: "{{ source.rows }}", p: "{{ asset('lake/orders').rows }}"}
        command: SELECT o.*, p.amount + 1 AS more FROM o JOIN p USING (id)
      - name: last
        kind: duckdb
        as: table
        input: {b: "{{ both }}"}
        command: SELECT id, more AS most FROM b
    next: [table]
  - step: table
    tool: {kind: postgres, auth: embedded, command: SELECT * FROM lake.daily}
    next: [elsewhere]
  - step: elsewhere
    tool: {kind: postgres, command: SELECT day FROM lake.daily}
    next: [odd]
  - step: odd
    tool: {kind: postgres, auth: embedded, command: "SHOW search_path"}
"""


@pytest.fixture
def noetl(noetl: EngineProvider, settings: Settings) -> EngineProvider:
    return EngineProvider(settings.model_copy(update={"default_postgres_credential": "embedded"}))


@pytest.fixture
def latest(dagster_instance: DagsterInstance) -> Callable[[str], AssetMaterialization]:
    def latest(key: str) -> AssetMaterialization:
        event = dagster_instance.get_latest_materialization_event(AssetKey.from_user_string(key))
        assert event is not None
        found = event.asset_materialization
        assert found is not None
        return found

    return latest


def lineage(made: AssetMaterialization) -> dict[str, list[str]] | None:
    found: Any = made.metadata.get("dagster/column_lineage")
    if found is None:
        return None
    return {
        column: [f"{dep.asset_key.to_user_string()}.{dep.column_name}" for dep in deps]
        for column, deps in found.value.deps_by_column.items()
    }


def said_of_columns(made: AssetMaterialization) -> dict[str, str | None]:
    """What Dagster's UI, which shows no lineage of columns, shows beside each column."""
    schema: Any = made.metadata["dagster/column_schema"]
    return {column.name: column.description for column in schema.value.columns}


def run(noetl: EngineProvider, instance: DagsterInstance, name: str, **texts: str) -> None:
    definitions = definitions_of([playbook(text, one) for one, text in texts.items()], noetl)
    result = definitions.resolve_job_def(name).execute_in_process(instance=instance, raise_on_error=False)
    failed = [event.step_failure_data.error for event in result.all_events if event.is_step_failure]
    assert result.success, failed


def test_columns_from_step_to_step_and_from_playbook_to_playbook(
    noetl: EngineProvider,
    dagster_instance: DagsterInstance,
    latest: Callable[[str], AssetMaterialization],
) -> None:
    run(noetl, dagster_instance, "flow", flow=FLOW, reader=READER)
    assert lineage(latest("lake/orders")) is None, "of no asset, but of a table that the step makes itself"
    assert latest("lake/orders").metadata["dagster/relation_identifier"].value == "lake.raw"
    assert lineage(latest("tests/flow/totals")) == {
        "Who": ["lake/orders.customer"],
        "total": ["lake/orders.amount"],
    }
    assert said_of_columns(latest("tests/flow/totals")) == {
        "Who": "from lake/orders: customer",
        "total": "from lake/orders: amount",
        "day": None,
        "n": None,
    }
    assert lineage(latest("lake/daily")) == {"day": ["lake/orders.who"], "most": ["lake/orders.amount"]}
    run(noetl, dagster_instance, "reader", flow=FLOW, reader=READER)
    assert lineage(latest("tests/reader/start")) == {"id": ["lake/orders.id"], "most": ["lake/orders.amount"]}
    assert lineage(latest("tests/reader/table")) == {"day": ["lake/daily.day"], "most": ["lake/daily.most"]}
    assert lineage(latest("tests/reader/elsewhere")) is None, "another credential, perhaps another database"
    assert lineage(latest("tests/reader/odd")) is None


def test_a_run_that_has_loaded_one_playbook_finds_the_others(
    noetl: EngineProvider,
    dagster_instance: DagsterInstance,
    settings: Settings,
    latest: Callable[[str], AssetMaterialization],
    tmp_path: Any,
) -> None:
    for name, text in (("flow", FLOW), ("reader", READER)):
        (tmp_path / f"{name}.yaml").write_text(text_of(name, text))
    own = EngineProvider(noetl.settings.model_copy(update={"playbooks_path": tmp_path}))
    for number, name in enumerate(("flow", "reader")):
        done = launch(load_playbook(tmp_path / f"{name}.yaml"), own, dagster_instance, execution_id=700 + number)
        assert done.success, done.error
    assert lineage(latest("tests/reader/table")) == {"day": ["lake/daily.day"], "most": ["lake/daily.most"]}
