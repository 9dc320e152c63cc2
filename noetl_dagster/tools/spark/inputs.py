"""The inputs and SQL statements of a spark task: results by name or reference, files, tables, rows, scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

from noetl_dagster.playbook.templates.rendering import with_references
from noetl_dagster.playbook.templates.views import ResultView, plain
from noetl_dagster.settings import Settings
from noetl_dagster.spark.frames import (
    InputRows,
    outside_frame,
    parsed,
    references_in,
    row_frame,
    stored_frame,
)
from noetl_dagster.spark.results import VALUE
from noetl_dagster.spark.staging import Staging
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.files import check_path, written_in
from noetl_dagster.tools.sql.databases.binding import SPARK, split


async def stored_inputs(call: ToolCall, context: ToolContext) -> dict[str, InputRows]:
    """Returns the inputs that are results: those under ``from`` by name, those under ``input`` by reference.

    ``from`` has addresses, ``step``, ``task`` or ``task.key``, by input name; a list keeps their names.
    """
    addresses = call.config.get("from") or {}
    if not isinstance(addresses, Mapping):
        addresses = {address: address for address in ([addresses] if isinstance(addresses, str) else addresses)}
    stored: dict[str, InputRows] = {}
    for name, address in addresses.items():
        rows = stored[str(name)] = InputRows()
        await rows.add_result(await _envelope(str(address), call, context), context.results)
    for name, value in call.input.items():
        for ref in references_in(value):
            await stored.setdefault(name, InputRows()).add(ref, context.results)
    return stored


async def _envelope(address: str, call: ToolCall, context: ToolContext) -> Mapping[str, Any]:
    """Returns the result at an address; a stored one is not fetched."""
    name, _, rest = address.partition(".")
    if name not in call.scope:
        raise call.error(f"'from' names {name!r}, which has no result here")
    view = call.scope[name]
    if not rest:
        return view.envelope if isinstance(view, ResultView) else {"status": "ok", "data": plain(view)}

    def follow() -> Any:
        value = view
        for key in rest.split("."):
            value = value[key]
        return plain(value)

    try:
        value = await with_references(context.results.get, follow)
    except (KeyError, TypeError) as error:
        raise call.error(f"{name!r} has no {rest!r}") from error
    is_reference = not isinstance(value, list) and references_in(value)
    return {"ref": value} if is_reference else {"status": "ok", "data": value}


def inputs_of(
    spark: SparkSession,
    call: ToolCall,
    stored: Mapping[str, InputRows],
    settings: Settings,
    staging: Staging | None,
    *,
    rows_too: bool,
) -> dict[str, Any]:
    """Returns every input by name: as a DataFrame if it is one, else unchanged.

    Args:
        staging: see :func:`noetl_dagster.spark.frames.stored_frame`.
        rows_too: lists of rows become DataFrames as well, and JSON gets the columns that a first pass finds.
    """
    schemas = call.config.get("schemas") or {}
    inputs: dict[str, Any] = dict(call.input)
    for name, value in call.input.items():
        if isinstance(value, Mapping):
            _check_paths(value, name, call, settings)
            frame = outside_frame(spark, value, call.folder)
            if frame is not None:
                inputs[name] = frame
        elif rows_too and _are_rows(value):
            inputs[name] = row_frame(spark, value)
    for name, rows in stored.items():
        frame = stored_frame(spark, settings, rows, staging)
        schema = schemas.get(name)
        if frame.columns == [VALUE] and (schema is not None or rows_too):
            frame = parsed(frame, None if schema in (None, "infer") else str(schema))
        inputs[name] = frame
    return inputs


def _are_rows(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and bool(value) and all(isinstance(row, Mapping) for row in value)


def split_spark_statements(sql: str) -> list[str]:
    """Returns the statements of a script without semicolons; empty ones and bare comments are left out.

    A compound statement, ``BEGIN ... END``, and all that follows it stay in one piece. So does text that cannot be
    parsed, for which Spark reports the error.
    """
    if ";" not in sql:  # most, which need no scanner
        return [sql.strip()] if sql.strip() else []
    return [text for text, _ in split(sql, SPARK)]


def _check_paths(value: Mapping[str, Any], name: str, call: ToolCall, settings: Settings) -> None:
    """Raises ``ToolError`` if a template leads a path of an input out of its folder."""
    rendered, inputs = value.get("path"), call.task.input
    written = written_in(inputs.get(name), "path") if isinstance(inputs, Mapping) else None
    if rendered != written:
        paths = rendered if isinstance(rendered, list) else [rendered]
        texts = written if isinstance(written, list) and len(written) == len(paths) else [written] * len(paths)
        for path, text in zip(paths, texts, strict=True):
            check_path(path, text, call.folder, settings, f"spark in step {call.step}, input {name!r}, path")
