"""Assets beyond playbooks: ordinary Python assets that steps read, and sources that are observed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from dagster import (
    AssetKey,
    AssetObservation,
    DagsterInstance,
    Definitions,
    StaticPartitionsDefinition,
    asset,
    build_sensor_context,
    materialize,
    mem_io_manager,
)

from noetl_dagster import MinioIOManager, PvcIOManager
from noetl_dagster.compiler.automation import build_observation_sensor, build_pool_sensor, limits_of
from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from tests.definitions import definitions_of
from tests.playbooks import playbook
from tests.waiting import until_now

READER = """
workflow:
  - step: start
    from: {rows: {asset: lake/rows%s}}
    tool: {kind: python, input: {rows: "{{ rows }}"}, code: "result = [row['id'] for row in rows]"}
"""
ROWS = [{"id": 1}, {"id": 2}]


@pytest.fixture
def run(noetl: EngineProvider, dagster_instance: DagsterInstance) -> Any:
    def run(text: str, *beside: Any, **resources: Any) -> ExecutionState:
        defs = Definitions.merge(
            definitions_of([playbook(text)], noetl), Definitions(assets=beside, resources=resources)
        )
        result = defs.resolve_job_def("sample").execute_in_process(instance=dagster_instance, raise_on_error=False)
        record = dagster_instance.get_run_by_id(result.run_id)
        assert record is not None
        return run_sync(noetl.engine().runtime.load(int(record.tags[EXECUTION_TAG]))).state

    return run


def test_a_step_reads_what_a_python_asset_made(run: Any, dagster_instance: DagsterInstance, settings: Settings) -> None:
    manager = MinioIOManager(endpoint=settings.minio_endpoint, bucket=settings.minio_bucket, prefix="lake")

    @asset(key=["lake", "rows"], io_manager_key="lake")
    def rows() -> list[dict[str, int]]:
        return ROWS

    assert materialize([rows], instance=dagster_instance, resources={"lake": manager}).success
    state = run(READER % "", rows, lake=manager)
    assert state.status == "COMPLETED", state.error
    assert state.latest["start"].envelope["data"] == [1, 2]


def test_what_a_step_settled_on_outlives_the_next_materialisation(
    noetl: EngineProvider, dagster_instance: DagsterInstance, settings: Settings, tmp_path: Path
) -> None:
    """The asset is made anew while the step is at its first of two tasks; the second reads what was settled."""
    manager = PvcIOManager(mount_path=str(settings.pvc_mount_path))
    versions = iter([ROWS, [{"id": 3}]])

    @asset(key=["lake", "rows"], io_manager_key="lake")
    def rows() -> list[dict[str, int]]:
        return next(versions)

    def make() -> None:
        assert materialize([rows], instance=dagster_instance, resources={"lake": manager}).success

    make()
    text = """
workflow:
  - step: start
    from: {rows: lake/rows}
    tool:
      - name: wait
        kind: python
        input: {folder: "FOLDER"}
        code: |
          import pathlib, time
          pathlib.Path(folder, "begun").touch()
          while not pathlib.Path(folder, "go").exists():
              time.sleep(0.02)
          result = 1
      - name: read
        kind: python
        input: {rows: "{{ rows }}"}
        code: "result = [row['id'] for row in rows]"
"""
    flow = playbook(text.replace("FOLDER", str(tmp_path)))
    defs = Definitions.merge(definitions_of([flow], noetl), Definitions(assets=[rows], resources={"lake": manager}))
    job = defs.resolve_job_def("sample")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(job.execute_in_process, instance=dagster_instance, raise_on_error=False)
        until_now(lambda: running.done() or (tmp_path / "begun").exists())
        make()
        (tmp_path / "go").touch()
        record = dagster_instance.get_run_by_id(running.result().run_id)
    assert record is not None
    state = run_sync(noetl.engine().runtime.load(int(record.tags[EXECUTION_TAG]))).state
    assert state.status == "COMPLETED", state.error
    assert state.latest["start"].envelope["data"] == [1, 2]


def test_a_partition_of_a_python_asset(run: Any, dagster_instance: DagsterInstance, settings: Settings) -> None:
    manager = PvcIOManager(mount_path=str(settings.pvc_mount_path), prefix="lake")

    @asset(
        key=["lake", "rows"],
        io_manager_key="lake",
        partitions_def=StaticPartitionsDefinition(["north", "south"]),
    )
    def rows(context):  # type: ignore[no-untyped-def]
        return [{"id": context.partition_key}]

    rows_of = {"assets": [rows], "instance": dagster_instance, "resources": {"lake": manager}}
    for key in ("north", "south"):
        assert materialize(**rows_of, partition_key=key).success
    state = run(READER % ", partition: north", rows, lake=manager)
    assert state.latest["start"].envelope["data"] == ["north"]


def test_an_asset_that_nobody_here_can_load(run: Any, dagster_instance: DagsterInstance) -> None:
    @asset(key=["lake", "rows"], io_manager_key="lake")
    def rows() -> list[dict[str, int]]:
        return ROWS

    assert materialize([rows], instance=dagster_instance, resources={"lake": mem_io_manager}).success
    state = run(READER % "")
    assert "asset lake/rows is kept by an IO manager that this run does not know" in str(state.error)


OBSERVER = """
dagster:
  pools: {{api: 3}}
  observe:
    - {{asset: lake/files, object: "{folder}/*.txt", every: 10s}}
    - {{asset: lake/objects, object: "s3://{bucket}/observed/*.csv", every: 10s}}
    - {{asset: shop/orders, table: public.orders, every: 10s}}
workflow:
  - {{step: start, tool: {{kind: noop}}, spec: {{pool: api}}, from: {{x: lake/files}}}}
"""


def test_sources_are_observed(
    noetl: EngineProvider, dagster_instance: DagsterInstance, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.csv").write_text("other")
    bucket = settings.minio_bucket
    client = boto3.client(
        "s3",
        endpoint_url=settings.minio_endpoint,
        aws_access_key_id=settings.minio_access_key,
        aws_secret_access_key=settings.minio_secret_key.get_secret_value(),
        region_name=settings.minio_region,
    )
    noetl.run(noetl.engine().runtime.results.put(b"x" * 200_000, execution_id=1, step="a", name="b"))
    client.put_object(Bucket=bucket, Key="observed/x.csv", Body=b"1,2")
    pool = noetl.engine().runtime.pool
    noetl.run(pool.execute("CREATE TABLE public.orders AS SELECT 1 AS id"))
    flow = playbook(OBSERVER.format(folder=tmp_path, bucket=bucket))
    sensor = build_observation_sensor([flow], noetl)
    assert sensor is not None

    def look(cursor: str | None) -> tuple[dict[str, AssetObservation], str]:
        context = build_sensor_context(instance=dagster_instance, cursor=cursor)
        result = sensor.evaluate_tick(context)
        events = {event.asset_key.to_user_string(): event for event in result.asset_events}
        return events, str(result.cursor)

    first, cursor = look(None)
    assert {name: event.metadata["bytes"].value for name, event in first.items() if name != "shop/orders"} == {
        "lake/files": 3,
        "lake/objects": 3,
    }
    assert first["shop/orders"].metadata["dagster/relation_identifier"].value == "public.orders"
    assert look(cursor)[0] == {}, "not due yet"
    (tmp_path / "a.txt").write_text("more")
    later, _ = look(json.dumps(dict.fromkeys(json.loads(cursor), 0.0)))
    version = "dagster/data_version"
    assert later["lake/files"].tags[version] != first["lake/files"].tags[version]
    assert later["lake/objects"].tags[version] == first["lake/objects"].tags[version]


def test_a_source_that_is_not_there_takes_no_other_with_it(
    noetl: EngineProvider, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    flow = playbook(OBSERVER.format(folder=tmp_path, bucket="no-such-bucket"))
    sensor = build_observation_sensor([flow], noetl)
    assert sensor is not None
    result = sensor.evaluate_tick(build_sensor_context(instance=dagster_instance))
    assert [event.asset_key for event in result.asset_events] == [AssetKey(["lake", "files"])]
    assert "lake/objects: s3://no-such-bucket/observed/*.csv cannot be listed" in str(result.skip_message)
    assert "shop/orders: table public.orders cannot be observed" in str(result.skip_message)


def test_a_source_is_an_asset_that_steps_read(noetl: EngineProvider, tmp_path: Path) -> None:
    flow = playbook(OBSERVER.format(folder=tmp_path, bucket="b"))
    graph = definitions_of([flow], noetl).resolve_asset_graph()
    assert AssetKey(["shop", "orders"]) in graph.observable_asset_keys
    step = graph.get(AssetKey(["tests", "sample", "start"]))
    assert step.parent_keys == {AssetKey(["lake", "files"])}


def test_pools_have_the_slots_that_playbooks_say(dagster_instance: DagsterInstance, tmp_path: Path) -> None:
    flow = playbook(OBSERVER.format(folder=tmp_path, bucket="b"))
    more = playbook("dagster: {pools: {api: 2, db: 1}}\nworkflow:\n  - {step: start, tool: {kind: noop}}\n")
    assert limits_of([flow, more]) == {"api": 2, "db": 1}
    sensor = build_pool_sensor([flow, more])
    assert sensor is not None
    sensor.evaluate_tick(build_sensor_context(instance=dagster_instance))
    limits = {pool.name: pool.limit for pool in dagster_instance.event_log_storage.get_pool_limits()}
    assert limits == {"api": 2, "db": 1}
    assert build_pool_sensor([playbook("workflow:\n  - {step: start, tool: {kind: noop}}\n")]) is None


def test_the_op_of_a_step_takes_a_slot_of_its_pool(noetl: EngineProvider, tmp_path: Path) -> None:
    flow = playbook(OBSERVER.format(folder=tmp_path, bucket="b"))
    job = definitions_of([flow], noetl).resolve_job_def("sample")
    assert [node.definition.pools for node in job.graph.nodes] == [{"api"}]
