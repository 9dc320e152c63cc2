"""Columns of a step's result and their lineage, as metadata of its asset."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from dagster import AssetKey, MetadataValue, TableColumn, TableColumnDep, TableColumnLineage, TableSchema

from noetl_dagster.compiler.lineage.tables import SQL_KINDS
from noetl_dagster.compiler.plan import PlaybookPlan
from noetl_dagster.events.envelopes import Envelope, from_result
from noetl_dagster.events.state import ExecutionState, StepEnd
from noetl_dagster.playbook.models import Step

logger = logging.getLogger(__name__)

ROWS_LOOKED_AT = 100
"""Rows that are read for the columns of a result that is a list of mappings."""

_JSON: Mapping[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}

_READER = "noetl_dagster.compiler.lineage.steps"
"""Imports an SQL parser, which takes a tenth of a second: only for steps with SQL, and while these run."""


def prepare_lineage(step: Step) -> None:
    """Imports the SQL parser for the end of a step with SQL, while the step runs."""
    if has_sql(step):
        threading.Thread(target=import_module, args=[_READER], name="noetl-lineage", daemon=True).start()


def has_sql(step: Step) -> bool:
    """Reports whether a task of a step runs SQL from the playbook."""
    return any(task.kind in SQL_KINDS and task.config.get("command") is not None for task in step.tasks)


def lineage_metadata(plan: PlaybookPlan, step: Step, end: StepEnd, state: ExecutionState) -> dict[str, Any]:
    """Returns ``dagster/column_lineage`` of a step's asset, as far as it is known."""
    if not has_sql(step):
        return {}
    reader = import_module(_READER)

    def result_columns(name: str, task: str | None = None) -> Sequence[str] | None:
        ended = end if name == step.name else state.latest.get(name)
        return None if ended is None else columns_of(ended.envelope, task)

    def read_columns(name: str, read: str) -> Sequence[str] | None:
        kept = state.reads.get((name, end.visit if name == step.name else 1), {}).get(read)
        return columns_of(from_result(kept["result"])) if kept is not None and "result" in kept else None

    seen = reader.KnownColumns(
        workload=state.workload,
        hidden=frozenset(state.ctx),
        result_columns=result_columns,
        read_columns=read_columns,
        writers=plan.writers,
    )
    try:
        found = reader.column_lineage(plan.playbook, step, seen)
    except Exception:  # lineage is for people: an error in it must not fail the step
        logger.debug("step %s of %s has no column lineage", step.name, plan.playbook.name, exc_info=True)
        return {}
    if not found:
        return {}
    lineage = TableColumnLineage(
        {
            column: [TableColumnDep(AssetKey(key), name) for key, name in sorted(sources)]
            for column, sources in found.items()
        }
    )
    return {"dagster/column_lineage": MetadataValue.column_lineage(lineage)}


def rows_metadata(envelope: Envelope, *, partitioned: bool) -> dict[str, Any]:
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


def columns_of(envelope: Envelope, task: str | None = None) -> Sequence[str] | None:
    """Returns the columns of a result, if they are known or the result is small enough to be in the log.

    Args:
        task: one of the step's tasks; default: the whole.
    """
    if task is not None:
        results = envelope.get("results")
        found = results.get(task) if isinstance(results, Mapping) else None
        return columns_of(dict(found)) if isinstance(found, Mapping) else None
    reference = envelope.get("ref")
    if reference is not None:
        extra = reference.get("extra") if isinstance(reference, Mapping) else reference.extra
        columns = (extra or {}).get("columns")
        return list(columns) if isinstance(columns, Mapping) and columns else None
    data = envelope.get("data")
    if isinstance(data, Mapping):
        columns = data.get("columns")
        if isinstance(columns, list) and all(isinstance(one, str) for one in columns):
            return columns
        data = data.get("rows")
    if not isinstance(data, list) or not data or not all(isinstance(row, Mapping) for row in data):
        return None
    return list(dict.fromkeys(str(name) for row in data[:ROWS_LOOKED_AT] for name in row))
