"""Metadata of a step's asset and of its checks: counts, columns and their lineage, Spark's figures, the watermark."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from dagster import (
    AssetCheckSeverity,
    AssetKey,
    MetadataValue,
    TableColumn,
    TableColumnDep,
    TableColumnLineage,
    TableRecord,
    TableSchema,
)

from noetl_dagster.compiler.lineage.tables import ROWS_LOOKED_AT, columns_of, has_sql
from noetl_dagster.compiler.plan import PlaybookPlan, StepPlan
from noetl_dagster.compiler.specs import relation_metadata
from noetl_dagster.engine.executions.addresses import step_url
from noetl_dagster.events.envelopes import Envelope
from noetl_dagster.events.state import ExecutionState, StepEnd
from noetl_dagster.io_managers.metadata import LINEAGE, redacted, with_origins
from noetl_dagster.playbook.assets import Severity
from noetl_dagster.playbook.models import Step
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings
from noetl_dagster.worker.execution import Execution

logger = logging.getLogger(__name__)

_JSON: Mapping[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}

_READER = "noetl_dagster.compiler.lineage.steps"
"""Imports an SQL parser, which takes a tenth of a second: only for steps with SQL, and while these run."""


def prepare_lineage(step: Step) -> None:
    """Imports the SQL parser for the end of a step with SQL, while the step runs."""
    if has_sql(step):
        threading.Thread(target=import_module, args=[_READER], name="noetl-lineage", daemon=True).start()


def step_metadata(
    settings: Settings, plan: PlaybookPlan, one: StepPlan, end: StepEnd, execution: Execution, log: logging.Logger
) -> dict[str, Any]:
    """Returns the metadata of a step's asset.

    Args:
        log: of the run; gets a warning if some metadata cannot be determined.
    """
    state = execution.state
    metadata = place_metadata(settings, execution.id, end.step) | {"visit": MetadataValue.int(end.visit)}
    for key in ("total", "done", "failed"):
        if isinstance(end.envelope.get(key), int):
            metadata[key] = MetadataValue.int(end.envelope[key])
    spark = end.envelope.get("spark")
    for name, value in spark.items() if isinstance(spark, dict) else ():
        if isinstance(value, int | float | str):
            metadata[f"spark/{name}"] = value  # shuffle, spill and skew
    metadata |= _watermark_metadata(state.watermarks.get((end.step, end.visit)), end)
    try:
        metadata |= _rows_metadata(end.envelope, partitioned=state.partition is not None)
        metadata |= relation_metadata(plan.playbook, one.step, state.workload)
        metadata |= _lineage_metadata(plan, one.step, end, state)
        metadata = with_origins(metadata, metadata.get(LINEAGE))
    except Exception as error:  # metadata is for people: the step has completed without it
        log.warning(f"step {end.step}: some metadata is missing: {error!r}")
    return metadata


def check_facts(
    settings: Settings,
    one: StepPlan,
    end: StepEnd,
    execution: Execution,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Yields the fields of Dagster's evaluation of each declared check of a step that has ended.

    Args:
        more: further metadata.
    """
    declared = {check.name for check in one.checks}
    place = place_metadata(settings, execution.id, end.step) | dict(more)
    for outcome in execution.state.checks_of(end.step, end.visit):
        if outcome.name in declared:
            yield {
                "asset_key": one.key,
                "check_name": outcome.name,
                "passed": outcome.passed,
                "severity": AssetCheckSeverity.WARN if outcome.severity == Severity.WARN else AssetCheckSeverity.ERROR,
                "description": SECRETS.redact(outcome.why) or None,
                "metadata": redacted(place | check_metadata(outcome.facts)),
            }


def place_metadata(settings: Settings, execution_id: int, step: str) -> dict[str, Any]:
    """Returns where to read more: the execution, and the page of the step."""
    return {"execution": str(execution_id), "page": MetadataValue.url(step_url(settings, execution_id, step))}


def check_metadata(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of a check as metadata: examples as a table."""
    metadata = dict(facts)
    rows = metadata.pop("examples", None)
    if rows:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = [TableRecord({name: _cell(row.get(name)) for name in columns}) for row in rows]
        metadata["examples"] = MetadataValue.table(
            table, schema=TableSchema([TableColumn(name, "string") for name in columns])
        )
    return metadata


def _cell(value: Any) -> str | int | float | bool | None:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _watermark_metadata(claim: dict[str, Any] | None, end: StepEnd) -> dict[str, Any]:
    """Returns the step's watermark after a visit, and the one before."""
    if claim is None:
        return {}
    now = claim["value"] if end.watermark is None else end.watermark["value"]
    shown = {"watermark": now, "previous_watermark": claim["value"]}
    return {name: value for name, value in shown.items() if value is not None}


def _lineage_metadata(plan: PlaybookPlan, step: Step, end: StepEnd, state: ExecutionState) -> dict[str, Any]:
    """Returns ``dagster/column_lineage`` of a step's asset, as far as it is known."""
    if not has_sql(step):
        return {}
    try:
        sources_by_column = import_module(_READER).column_lineage(plan.playbook, step, end, state, plan.writers)
    except Exception:  # lineage is for people: an error in it must not fail the step
        logger.debug("step %s of %s has no column lineage", step.name, plan.playbook.name, exc_info=True)
        return {}
    if not sources_by_column:
        return {}
    lineage = TableColumnLineage(
        {
            column: [TableColumnDep(AssetKey(key), name) for key, name in sorted(sources)]
            for column, sources in sources_by_column.items()
        }
    )
    return {LINEAGE: MetadataValue.column_lineage(lineage)}


def _rows_metadata(envelope: Envelope, *, partitioned: bool) -> dict[str, Any]:
    """Returns the number and columns of a result's rows in the log; references have those of other results."""
    data = envelope.get("data")
    rows = data.get("rows") if isinstance(data, Mapping) else None
    names = columns_of(envelope)
    if not isinstance(rows, list) or not isinstance(data, Mapping) or not names:
        return {}
    if data.get("row_count") != len(rows) or not all(isinstance(row, Mapping) for row in rows):
        return {}
    schema = TableSchema([TableColumn(name, _kind_of(name, rows)) for name in names])
    count = "dagster/partition_row_count" if partitioned else "dagster/row_count"
    return {count: len(rows), "dagster/column_schema": MetadataValue.table_schema(schema)}


def _kind_of(column: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns JSON's names for the types of a column's values."""
    values = (row.get(column) for row in rows[:ROWS_LOOKED_AT])
    kinds = {_JSON.get(type(value), "object") for value in values if value is not None}
    return " or ".join(sorted(kinds)) or "unknown"
