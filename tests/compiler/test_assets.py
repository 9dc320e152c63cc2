"""What Dagster knows of a playbook's assets: lineage, partitions, checks, owners, metadata."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from dagster import (
    AssetKey,
    AssetRecordsFilter,
    AutomationCondition,
    DagsterInstance,
    Definitions,
    ExecuteInProcessResult,
    MetadataValue,
    asset,
    build_schedule_context,
)

from noetl_dagster.compiler.runs import EXECUTION_TAG, PAGE_TAG
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from tests.definitions import definitions_of
from tests.playbooks import playbook

MAKER = """
dagster:
  group: clinical
  owners: ["team:data"]
  tags: {domain: health}
  freshness: {warn_after: 26h, fail_after: 50h}
  automation: {on_cron: "0 2 * * *"}
workflow:
  - step: start
    asset: false
    tool: {kind: python, code: "result = [{'id': 1}, {'id': 2}]"}
    next: [patients]
  - step: patients
    asset:
      key: warehouse/patients
      description: who there is
      owners: [ana@example.org]
      kinds: [parquet]
      metadata: {source: clinic}
      code_version: "3"
    checks:
      - {name: enough, row_count: 2}
      - {name: unique, unique: id, blocking: true}
      - {name: many, row_count: 9, severity: warn}
    tool: {kind: python, input: {rows: "{{ start }}"}, code: "result = rows"}
"""
READER = """
workflow:
  - step: start
    from: {patients: warehouse/patients}
    tool: {kind: python, input: {rows: "{{ patients }}"}, code: "result = len(rows)"}
"""
DAILY = 'dagster: {partitions: {kind: daily, start: "2026-01-01", workload: day}}\n'
PATIENTS = AssetKey(["warehouse", "patients"])


class Ran:
    """A job of some playbooks that ran in this process."""

    def __init__(self, noetl: EngineProvider, instance: DagsterInstance) -> None:
        self.noetl, self.instance = noetl, instance

    def definitions(self, **texts: str) -> Definitions:
        return definitions_of([playbook(text, name) for name, text in texts.items()], self.noetl)

    def run(self, text: str, name: str = "sample", **options: Any) -> ExecuteInProcessResult:
        job = self.definitions(**{name: text}).resolve_job_def(name)
        return job.execute_in_process(instance=self.instance, raise_on_error=False, **options)

    def state(self, result: ExecuteInProcessResult) -> ExecutionState:
        run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        return run_sync(self.noetl.engine().runtime.load(int(run.tags[EXECUTION_TAG]))).state


@pytest.fixture
def ran(noetl: EngineProvider, dagster_instance: DagsterInstance) -> Ran:
    return Ran(noetl, dagster_instance)


def test_what_a_step_says_of_its_asset(ran: Ran) -> None:
    graph = ran.definitions(maker=MAKER).resolve_asset_graph()
    assert graph.get_all_asset_keys() == {PATIENTS}, "the first step is none"
    node = graph.get(PATIENTS)
    assert node.group_name == "clinical"
    assert node.owners == ["ana@example.org"]
    assert node.tags == {"domain": "health", "dagster/kind/parquet": ""}
    assert node.description == "who there is"
    assert node.code_version == "3"
    assert node.metadata["source"] == "clinic"
    assert node.automation_condition == AutomationCondition.on_cron("0 2 * * *")
    assert node.freshness_policy is not None
    assert graph.get_check_spec
    assert {key.name for key in graph.asset_check_keys} == {"enough", "unique", "many"}


def test_where_a_step_stands_in_its_playbook(ran: Ran, tmp_path: Any) -> None:
    from noetl_dagster.playbook.loader import load_playbook

    file = tmp_path / "flow.yaml"
    file.write_text("apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: flow, path: flow}\n" + READER)
    defs = definitions_of([load_playbook(file)], ran.noetl)
    (node,) = [node for node in defs.resolve_asset_graph().asset_nodes if node.is_materializable]
    (line,) = node.metadata["dagster/code_references"].code_references
    assert (line.file_path, line.line_number) == (str(file), 6)


def test_checks_are_evaluated_by_the_run_and_lead_to_the_pages(ran: Ran, settings: Settings) -> None:
    ran.noetl = EngineProvider(settings.model_copy(update={"pages_url": "https://noetl.example.org/"}))
    result = ran.run(MAKER)
    assert result.success
    run = ran.instance.get_run_by_id(result.run_id)
    assert run is not None
    page = f"https://noetl.example.org/executions/{run.tags[EXECUTION_TAG]}"
    assert run.tags[PAGE_TAG] == page
    event = ran.instance.get_latest_materialization_event(AssetKey(["warehouse", "patients"]))
    assert event is not None
    assert event.asset_materialization is not None
    shown = [event.asset_materialization, *result.get_asset_check_evaluations()]
    assert len(shown) == 4
    for one in shown:
        assert one.metadata["page"] == MetadataValue.url(f"{page}/steps/patients")
    evaluations = {one.check_name: one for one in result.get_asset_check_evaluations()}
    assert {name: one.passed for name, one in evaluations.items()} == {"enough": True, "unique": True, "many": False}
    assert evaluations["many"].severity.value == "WARN"
    assert evaluations["many"].description == "2 rows, wanted at least 9"
    assert evaluations["many"].metadata["rows"].value == 2


def test_a_failed_blocking_check_leaves_nothing_to_read(ran: Ran) -> None:
    result = ran.run(MAKER.replace("'id': 2", "'id': 1"))
    assert not result.success
    evaluations = {one.check_name: one.passed for one in result.get_asset_check_evaluations()}
    assert evaluations == {"enough": True, "unique": False, "many": False}
    assert not result.get_asset_materialization_events()
    assert "did not pass unique: 1 rows repeat id" in str(ran.state(result).error)
    read = ran.run(READER)
    assert "asset warehouse/patients has no result yet" in str(ran.state(read).error)


def test_lineage_passes_through_steps_that_are_no_assets(ran: Ran) -> None:
    text = """
    workflow:
      - {step: start, tool: {kind: noop}, next: [between]}
      - {step: between, asset: false, from: {x: lake/raw}, tool: {kind: noop}, next: [last]}
      - {step: last, tool: {kind: noop}}
    """
    graph = ran.definitions(sample=text).resolve_asset_graph()
    last = graph.get(AssetKey(["tests", "sample", "last"]))
    assert last.parent_keys == {AssetKey(["tests", "sample", "start"]), AssetKey(["lake", "raw"])}


def test_a_playbook_without_assets_is_a_job(ran: Ran) -> None:
    text = "workflow:\n  - {step: start, asset: false, tool: {kind: noop}}\n"
    assert ran.run(text).success
    assert not ran.definitions(sample=text).resolve_asset_graph().get_all_asset_keys()


SINK = """
workload:
  day: null
  table: shop.orders
  made: CREATE SCHEMA IF NOT EXISTS shop; CREATE TABLE IF NOT EXISTS shop.orders (id int, name text)
workflow:
  - step: start
    asset: false
    tool: {kind: postgres, auth: embedded, command: "{{ made }}"}
    next: [orders]
  - step: orders
    loop: {in: "{{ [1, 2] }}", iterator: n}
    tool:
      kind: python
      input: {n: "{{ n }}"}
      code: "result = {'id': n}"
      sink: {tool: {kind: postgres, auth: embedded, table: "{{ table }}"}}
    next: [read]
  - step: read
    tool: {kind: postgres, auth: embedded, command: "SELECT id, name, 1.5 AS x FROM shop.orders"}
"""


def test_what_is_known_of_a_result_has_dagsters_own_names(ran: Ran, settings: Settings) -> None:
    """A table that is written, and rows that are small enough for the event log; of a partition, its rows."""
    ran.noetl = EngineProvider(settings.model_copy(update={"default_postgres_credential": "embedded"}))
    graph = ran.definitions(sample=SINK).resolve_asset_graph()
    orders, read = (AssetKey(["tests", "sample", step]) for step in ("orders", "read"))
    table = {"dagster/relation_identifier": "shop.orders", "dagster/storage_kind": "postgres"}
    assert table.items() <= dict(graph.get(orders).metadata).items()
    for key, rows in ((None, "dagster/row_count"), ("2026-01-05", "dagster/partition_row_count")):
        assert ran.run(SINK if key is None else DAILY + SINK, partition_key=key).success
        found = {}
        for asset_key in (orders, read):
            event = ran.instance.get_latest_materialization_event(asset_key)
            assert event is not None
            assert event.asset_materialization is not None
            found[asset_key] = {name: one.value for name, one in event.asset_materialization.metadata.items()}
        assert table.items() <= found[orders].items()
        assert found[read]["dagster/storage_kind"] == "eventlog"
        assert "dagster/uri" not in found[read], "it leads nowhere"
        assert {name for name in found[read] if name.endswith("row_count")} == {rows}
        schema = found[read]["dagster/column_schema"]
        assert [(one.name, one.type) for one in schema.columns] == [
            ("id", "number"),
            ("name", "unknown"),
            ("x", "string"),
        ]


def test_a_run_of_a_partition(ran: Ran) -> None:
    text = (
        DAILY
        + """
workload: {day: none}
workflow:
  - step: start
    tool: {kind: python, input: {it: "{{ [day, partition.start] }}"}, code: "result = it"}
    checks: [{name: there, when: "{{ output }}"}]
"""
    )
    result = ran.run(text, partition_key="2026-01-05")
    assert result.success
    state = ran.state(result)
    assert state.partition is not None
    assert state.latest["start"].envelope["data"] == ["2026-01-05", "2026-01-05T00:00:00+00:00"]
    key = AssetKey(["tests", "sample", "start"])
    assert ran.instance.get_materialized_partitions(key) == {"2026-01-05"}
    ran.run(text, partition_key="2026-01-06")
    records = ran.instance.fetch_materializations(
        AssetRecordsFilter(key, asset_partitions=["2026-01-06"]), limit=5
    ).records
    assert len(records) == 1


def test_two_dimensions(ran: Ran) -> None:
    text = """
dagster: {partitions: {two: {day: {kind: daily, start: "2026-01-01"}, place: {static: [berlin, bonn]}}}}
workload: {day: none, place: none}
workflow:
  - step: start
    tool: {kind: python, input: {it: "{{ [day, place, partition.place.key, partition.key] }}"}, code: "result = it"}
"""
    result = ran.run(text, partition_key="2026-01-05|bonn")
    assert ran.state(result).latest["start"].envelope["data"] == [
        "2026-01-05",
        "bonn",
        "bonn",
        "2026-01-05|bonn",
    ]


def test_a_run_of_no_partition_is_refused(ran: Ran) -> None:
    text = DAILY + "workload: {day: none}\nworkflow:\n  - {step: start, tool: {kind: noop}}\n"
    result = ran.run(text)
    assert not result.success
    failures = [event.step_failure_data.error for event in result.all_events if event.is_step_failure]
    assert "has partitions, and this run is of none; launch it with one of them" in str(failures)


def test_partitions_of_what_is_read(ran: Ran) -> None:
    """The same partition as the reader's, the latest one, all, and one by its name."""
    maker = f"{DAILY}workload: {{day: none}}\nworkflow:\n  - step: make\n    asset: {{key: warehouse/patients}}\n" + (
        "    tool: {kind: python, input: {day: '{{ day }}'}, code: 'result = day'}\n"
    )
    reads = {"same": "same", "newest": "latest", "every": "all", "third": "2026-01-07"}
    sources = ", ".join(f'{name}: {{asset: warehouse/patients, partition: "{at}"}}' for name, at in reads.items())
    given = ", ".join(f"{name}: '{{{{ {name} }}}}'" for name in reads)
    reader = f"{DAILY}workload: {{day: none}}\nworkflow:\n  - step: start\n    from: {{{sources}}}\n" + (
        f"    tool: {{kind: python, input: {{{given}}}, code: 'result = [same, newest, every, third]'}}\n"
    )
    graph = ran.definitions(maker=maker, reader=reader).resolve_asset_graph()
    assert graph.get(AssetKey(["tests", "reader", "start"])).parent_keys == {PATIENTS}
    days = ["2026-01-05", "2026-01-07", "2026-01-06"]
    for day in days:
        assert ran.run(maker, "maker", partition_key=day).success
    read = ran.run(reader, "reader", partition_key="2026-01-05")
    assert read.success, ran.state(read).error
    assert ran.state(read).latest["start"].envelope["data"] == [
        "2026-01-05", "2026-01-06", {day: day for day in days}, "2026-01-07",
    ]  # fmt: skip


def test_a_python_asset_takes_the_result_of_a_partition(ran: Ran) -> None:
    maker = DAILY + "workload: {day: none}\n" + MAKER[MAKER.index("workflow:") :]
    defs = ran.definitions(maker=maker)
    from dagster import AssetIn, DailyPartitionsDefinition, materialize

    @asset(
        partitions_def=DailyPartitionsDefinition("2026-01-01"),
        ins={"patients": AssetIn(PATIENTS, input_manager_key="noetl_results")},
    )
    def count(patients):  # type: ignore[no-untyped-def]
        return len(patients)

    assert ran.run(maker, "maker", partition_key="2026-01-05").success
    made = materialize(
        [count, *defs.assets],  # type: ignore[misc]
        selection=[count],
        instance=ran.instance,
        partition_key="2026-01-05",
        resources=defs.resources,
    )
    assert made.output_for_node("count") == 2


def test_a_schedule_runs_the_job_with_its_workload(ran: Ran) -> None:
    text = """
dagster:
  schedules:
    - {name: nightly, cron: "0 2 * * *", timezone: Europe/Berlin, workload: {full: true}, status: running}
    - {name: weekly, cron: "@weekly"}
workload: {full: false}
workflow:
  - {step: start, tool: {kind: noop}}
"""
    repository = ran.definitions(sample=text).get_repository_def()
    nightly = repository.get_schedule_def("sample_nightly")
    assert nightly.cron_schedule == "0 2 * * *"
    assert nightly.execution_timezone == "Europe/Berlin"
    assert nightly.default_status.value == "RUNNING"
    assert repository.get_schedule_def("sample_weekly").default_status.value == "STOPPED"
    moment = datetime(2026, 1, 5, 1, tzinfo=UTC)
    context = build_schedule_context(instance=ran.instance, scheduled_execution_time=moment, repository_def=repository)
    (request,) = nightly.evaluate_tick(context).run_requests or []
    assert request.run_config == {"ops": {"sample_playbook": {"config": {"full": True}}}}


DUE = [
    ('{kind: daily, start: "2026-01-01"}', ["2026-01-04"]),
    ('{kind: daily, start: "2026-01-05"}', []),
    ("{static: [a, b]}", ["a", "b"]),
    ('{two: {day: {kind: daily, start: "2026-01-01"}, place: {static: [a, b]}}}', ["2026-01-04|a", "2026-01-04|b"]),
    ("{dynamic: customers}", ["new"]),
]


def test_a_schedule_of_partitions_asks_for_those_that_are_due(ran: Ran) -> None:
    ran.instance.add_dynamic_partitions("customers", ["new"])
    for partitions, keys in DUE:
        text = f"""
dagster:
  partitions: {partitions}
  schedules: [{{name: nightly, cron: "0 2 * * *"}}]
workflow:
  - {{step: start, tool: {{kind: noop}}}}
"""
        repository = ran.definitions(sample=text).get_repository_def()
        context = build_schedule_context(
            instance=ran.instance,
            scheduled_execution_time=datetime(2026, 1, 5, 2, tzinfo=UTC),
            repository_def=repository,
        )
        requests = repository.get_schedule_def("sample_nightly").evaluate_tick(context).run_requests or []
        assert [request.partition_key for request in requests] == keys, partitions


def test_a_playbook_of_one_step_is_materialised_alone(noetl: EngineProvider) -> None:
    """As the UI and backfills do it: the assets chosen among all, without the playbook's own job."""
    alone = playbook("workflow:\n  - {step: start, tool: {kind: noop}}\n", "alone")
    other = playbook("workflow:\n  - {step: start, tool: {kind: noop}}\n", "other")
    repository = definitions_of([alone, other], noetl).get_repository_def()
    key = AssetKey(["tests", "alone", "start"])
    job = repository.get_implicit_job_def_for_assets([key])
    assert job is not None
    subset = job.get_subset(asset_selection={key})
    assert "alone_playbook" in str(subset.run_config_schema.config_type.fields["ops"].config_type.fields.keys())


def test_assets_of_two_playbooks_in_one_run(ran: Ran) -> None:
    """Each playbook has an execution of its own, as "Materialize all", backfills and automation need it."""
    step = "workflow:\n  - {step: start, tool: {kind: python, code: 'result = 1'}}\n"
    reads = (
        "workflow:\n  - {step: start, from: {one: tests/first/start},\n"
        "     tool: {kind: python, input: {one: '{{ one }}'}, code: 'result = one + 1'}, next: [last]}\n"
        "  - {step: last, tool: {kind: python, input: {n: '{{ start }}'}, code: 'result = n + 1'}}\n"
    )
    defs = ran.definitions(first=step, second=reads)
    keys = {
        AssetKey(["tests", "first", "start"]),
        *(AssetKey(["tests", "second", s]) for s in ("start", "last")),
    }
    job = defs.get_repository_def().get_implicit_job_def_for_assets(list(keys))
    assert job is not None
    ended = job.get_subset(asset_selection=keys).execute_in_process(instance=ran.instance)
    assert ended.success
    run = ran.instance.get_run_by_id(ended.run_id)
    assert run is not None
    executions = [int(run.tags[f"{EXECUTION_TAG}.{name}"]) for name in ("first", "second")]
    runtime = ran.noetl.engine().runtime
    states = [run_sync(runtime.load(one)).state for one in executions]
    assert [(state.playbook, state.status) for state in states] == [
        ("first", "COMPLETED"),
        ("second", "COMPLETED"),
    ]
    assert states[1].latest["last"].envelope["data"] == 3
