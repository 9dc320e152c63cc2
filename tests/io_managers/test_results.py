"""Step results between assets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import DagsterInstance, asset, job, materialize, op

from noetl_dagster import NoetlResultIOManager
from noetl_dagster.errors import ReferenceNotAvailableError
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.result_ref import ResultRef, RowsAround
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import codec
from noetl_dagster.storage.codec import JsonLines
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import ResultStore
from tests.io_managers.readers import reader_of


@pytest.fixture
def resources(shared: ResultStore) -> dict[str, Any]:
    return {"io_manager": NoetlResultIOManager(lambda: shared)}


def put(store: ResultStore, value: Any, **options: Any) -> ResultRef:
    return run_sync(store.put(value, execution_id=5, step="load", name="result", **options))


def test_a_reference_is_only_pointed_at(
    shared: ResultStore, resources: dict[str, Any], dagster_instance: DagsterInstance
) -> None:
    rows = [{"id": 1}, {"id": 2}]
    ref = put(shared, rows, tier=StoreTier.MINIO)
    seen: dict[str, Any] = {}

    @asset(key=["examples", "flow", "load"])
    def load() -> Any:
        return ref

    @asset(key=["examples", "flow", "enveloped"])
    def enveloped() -> Any:
        return {"status": "ok", "ref": ref.model_dump(mode="json")}

    wanted = {
        "value": (load, list),
        "frame": (load, pd.DataFrame),
        "path": (load, Path),
        "raw": (enveloped, bytes),
        "pointer": (enveloped, ResultRef),
    }
    readers = [reader_of(name, of, kind, seen) for name, (of, kind) in wanted.items()]
    result = materialize([load, enveloped, *readers], resources=resources, instance=dagster_instance)
    assert result.success
    assert seen["value"] == rows
    assert list(seen["frame"]["id"]) == [1, 2]
    assert seen["path"].read_bytes() == seen["raw"] == b'[{"id":1},{"id":2}]'
    assert seen["pointer"].ref == ref.ref
    (materialization,) = result.asset_materializations_for_node("examples__flow__load")
    metadata = {name: entry.value for name, entry in materialization.metadata.items()}
    assert metadata["noetl/ref"] == ref.ref
    assert metadata["dagster/storage_kind"] == "minio"
    assert metadata["dagster/uri"] == ref.physical_uri
    assert metadata["sha256"] == ref.sha256
    assert "| id |" in metadata["preview"]


def in_parts(store: ResultStore, values: list[Any], around: RowsAround | None = None) -> ResultRef:
    parts = [put(store, value, tier=StoreTier.MINIO) for value in values]
    return run_sync(store.manifest(5, "load", "result", parts, Strategy.CONCAT, around=around))


def lines(rows: list[Any]) -> JsonLines:
    return JsonLines(codec.json_lines(rows), len(rows))


def read_as(
    ref: ResultRef, kinds: dict[str, Any], resources: dict[str, Any], instance: DagsterInstance
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What assets downstream of a reference get, and the metadata it is shown with."""
    seen: dict[str, Any] = {}

    @asset
    def load() -> Any:
        return ref

    readers = [reader_of(name, load, kind, seen) for name, kind in kinds.items()]
    result = materialize([load, *readers], resources=resources, instance=instance)
    assert result.success
    (materialization,) = result.asset_materializations_for_node("load")
    return seen, {name: entry.value for name, entry in materialization.metadata.items()}


FORMS = {"value": Any, "frame": pd.DataFrame, "table": pa.Table, "path": Path, "raw": bytes, "text": str}


def test_rows_in_parts_are_what_they_are_in_one(
    shared: ResultStore, resources: dict[str, Any], dagster_instance: DagsterInstance
) -> None:
    rows = [{"id": 1}, {"id": 2}, {"id": 3}]
    ref = in_parts(shared, [lines(rows[:2]), lines(rows[2:])])

    seen, metadata = read_as(ref, FORMS, resources, dagster_instance)

    assert seen["value"] == rows
    assert seen["table"].to_pylist() == rows
    assert seen["frame"].to_dict("records") == rows
    assert seen["path"].suffix == ".json"
    assert orjson.loads(seen["path"].read_bytes()) == orjson.loads(seen["raw"]) == rows
    assert orjson.loads(seen["text"]) == rows
    assert metadata["dagster/row_count"] == 3
    assert "| id |" in metadata["preview"]


def test_tables_in_parts_are_one_table(
    shared: ResultStore, resources: dict[str, Any], dagster_instance: DagsterInstance
) -> None:
    table = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]})
    ref = in_parts(shared, [table.slice(0, 2), table.slice(2)])
    kinds = {name: FORMS[name] for name in ("value", "frame", "table", "path", "raw")}

    seen, metadata = read_as(ref, kinds, resources, dagster_instance)

    assert seen["value"] == seen["table"] == table
    assert seen["frame"].equals(table.to_pandas())
    assert seen["path"].suffix == ".parquet"
    assert pq.read_table(seen["path"]) == pq.read_table(pa.BufferReader(seen["raw"])) == table
    assert [column.name for column in metadata["dagster/column_schema"].columns] == ["id", "name"]


def test_rows_beside_fields_are_one_mapping(
    shared: ResultStore, resources: dict[str, Any], dagster_instance: DagsterInstance
) -> None:
    rows = [{"id": 1}, {"id": 2}]
    ref = in_parts(shared, [lines(rows[:1]), lines(rows[1:])], RowsAround(fields={"row_count": 2}))

    seen, _ = read_as(ref, {"value": dict, "path": Path, "raw": bytes}, resources, dagster_instance)

    assert seen["value"] == {"row_count": 2, "rows": rows}
    assert orjson.loads(seen["path"].read_bytes()) == orjson.loads(seen["raw"]) == seen["value"]


@pytest.mark.parametrize("value", [{"a": 1}, "text", [1] * 20_000, {"status": "ok", "data": {"rows": [1]}}])
def test_raw_values_are_stored(resources: dict[str, Any], dagster_instance: DagsterInstance, value: Any) -> None:
    seen: list[Any] = []

    @asset
    def step() -> Any:
        return value

    @asset
    def reader(step: Any) -> None:
        seen.append(step)

    assert materialize([step, reader], resources=resources, instance=dagster_instance).success
    expected = value["data"] if isinstance(value, dict) and "data" in value else value
    assert seen == [expected]


def test_later_runs_find_the_latest(
    shared: ResultStore, resources: dict[str, Any], dagster_instance: DagsterInstance
) -> None:
    values = iter([1, 2])
    seen: list[Any] = []

    @asset
    def step() -> Any:
        return next(values)

    @asset
    def reader(step: int) -> None:
        seen.append(step)

    with pytest.raises(ReferenceNotAvailableError, match="asset step has no materialisation"):
        materialize([step, reader], selection=[reader], resources=resources, instance=dagster_instance)
    for _ in range(2):
        assert materialize([step], resources=resources, instance=dagster_instance).success
    assert materialize([step, reader], selection=[reader], resources=resources, instance=dagster_instance).success
    assert seen == [2]


def test_outputs_of_plain_ops_pass_too(resources: dict[str, Any], dagster_instance: DagsterInstance) -> None:
    seen: list[Any] = []

    @op
    def produce() -> list[int]:
        return [1, 2]

    @op
    def consume(items: list[int]) -> None:
        seen.append(items)

    @job(resource_defs=resources)
    def flow() -> None:
        consume(produce())

    assert flow.execute_in_process(instance=dagster_instance).success
    assert seen == [[1, 2]]
