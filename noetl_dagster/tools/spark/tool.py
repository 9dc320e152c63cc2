"""``kind: spark``: SQL or a Python function over DataFrames, with results of any tier as input."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import inheritable_thread_target
from pyspark.sql import DataFrame, SparkSession

from noetl_dagster.errors import (
    IntegrityError,
    NoetlError,
    ReferenceNotAvailableError,
    ServiceError,
    StorageError,
    ToolError,
)
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.spark import sessions
from noetl_dagster.spark.datasets import Layout, WrittenDataset, register, sizes_of_files, write_dataset
from noetl_dagster.spark.failures import failure_of
from noetl_dagster.spark.frames import IN_PLACE, InputRows
from noetl_dagster.spark.functions import load_function
from noetl_dagster.spark.metrics import failed_stage, metrics_of, report_connected, reporting
from noetl_dagster.spark.staging import Staging, staging_for
from noetl_dagster.storage import codec, locations
from noetl_dagster.tools.base import Chunk, Tool, ToolCall, ToolContext, ToolResult, count_of
from noetl_dagster.tools.files import load_script, script_file
from noetl_dagster.tools.python.code import (
    CodeFailure,
    Printed,
    Program,
    call_main,
    compile_code,
    run_program,
)
from noetl_dagster.tools.python.context import LiveScope
from noetl_dagster.tools.python.threads import CodeThreads
from noetl_dagster.tools.python.tool import rendered_templates
from noetl_dagster.tools.rows.arrow import json_rows
from noetl_dagster.tools.spark.inputs import inputs_of, split_spark_statements, stored_inputs
from noetl_dagster.values import RefusedValueError, admit, is_table

MOST_COLLECTED_ROWS = 10_000
"""Maximum rows that the driver collects, with ``collect: true`` or for a tier of single objects, unless ``max_rows`` is
set."""

MOST_WRITES = 4  # datasets of one call that are written in parallel
THREADS = 8  # calls that wait for Spark in parallel; Spark itself schedules their tasks

Written: TypeAlias = WrittenDataset | pa.Table
Metrics = dict[str, int | float]


class SparkTool(Tool):
    """Runs SQL or a Python function on the session that the process shares.

    Input: ``from`` names results that Spark reads in place, by step, task or ``task.key``: a list, or
    ``{pages: fetch_pages}`` to give them other names. Values of ``input`` that are references,
    ``{table: name}`` or ``{path, format, options}`` are DataFrames too; for SQL also lists of rows. JSON
    results have one text column ``value`` with one element per row, unless ``schemas: {name: "a INT" | infer}``
    is set; SQL infers.

    Then one of ``sql`` (every DataFrame is a view; the rows of the last statement are the result; ``params``
    binds ``:name``), ``function`` (``"file.py:name"``), ``code`` (defines ``main`` or leaves ``result``) and
    ``script`` (a file or URL with such code). Functions get ``spark`` and the inputs by parameter name.

    Output: a DataFrame becomes a dataset (``format``, ``partition_by``, ``tier``, ``options``), on tiers of
    single objects such as kv one Parquet object of at most ``max_rows``; a mapping with DataFrames in it
    becomes a mapping with references instead, any other value is unchanged. With ``collect: true`` a
    DataFrame becomes ``{rows, row_count, columns}`` with at most ``max_rows`` rows. A step that consumes chunks gets
    the files of a dataset one by one, after Spark has written all of them. The
    envelope's ``spark`` contains metrics, see :func:`noetl_dagster.spark.metrics.metrics_of`.

    Raises ``ToolError``, retryable when an executor, the JVM or the connection was lost.
    """

    def __init__(self) -> None:
        self._threads = CodeThreads(THREADS)

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the call, or only reports the rest of a dataset that an earlier run has written."""
        ways = [way for way in ("command", "function", "code", "script") if call.config.get(way)]
        if len(ways) != 1:
            message = f"needs one of sql, function, code and script; it has {' and '.join(ways) or 'none'}"
            raise ToolError(f"spark in step {call.step} {message}", kind="schema")
        recorded = await context.chunks.recorded(call) if context.chunks.wanted(call) else ()
        if recorded:
            dataset = await context.results.find(recorded[0].position["dataset"])
            await _report_parts(dataset, call, context, recorded)
            return ToolResult(ref=dataset)
        stored = await stored_inputs(call, context)
        layout = _layout(call)
        if not call.config.get("collect"):
            await context.results.ready(layout.tier_for(context.settings))
        try:
            spark = await self._threads.run(context.spark_of(call.services))
        except ServiceError as error:
            raise ToolError(str(error), kind=error.kind, retryable=True) from error
        program, rendered = await _program(call, context)
        run = _SparkRun(call, context, spark, stored, layout, program, rendered)
        try:
            async with reporting(spark, run.group, run.tell):
                value, datasets, metrics = await self._threads.run(run.perform)
        except asyncio.CancelledError:
            run.stopped.set()
            await asyncio.shield(asyncio.to_thread(sessions.cancel, spark, run.group))
            raise
        return await run.published(value, datasets, metrics)


async def _program(call: ToolCall, context: ToolContext) -> tuple[Program | None, Mapping[str, Any]]:
    """Returns the code of the call, if any, and the values of the templates in it."""
    source = await load_script(call, context) if call.config.get("script") else call.config.get("code")
    if not source:
        return None, {}
    try:
        program = compile_code(source, f"{call.step}.{call.task.name}")
    except CodeFailure as failure:
        details = {"py": {"exception_type": failure.exception_type}}
        text = f"{failure} (line {failure.line} of the code)"
        raise call.error(text, "python", details=details) from None
    return program, await rendered_templates(program, source, call, context)


def _layout(call: ToolCall) -> Layout:
    config = call.config
    columns = config.get("partition_by") or ()
    tier = config.get("tier") or call.task.spec.result.store
    try:
        layout = Layout(
            format=str(config.get("format") or "parquet"),
            tier=StoreTier(tier) if tier else None,
            partition_by=(columns,) if isinstance(columns, str) else tuple(columns),
            options=dict(config.get("options") or {}),
        )
        layout.check()
        return layout
    except ValueError as error:
        raise call.error(str(error)) from error


@dataclass(eq=False)
class _SparkRun:
    """One call.

    Attributes:
        stored: inputs that are results, by name.
        program, rendered: its code, if any, and the values of the templates in it.
        staging: files of the call on this machine's disk, if Spark's tasks run in this process's JVM.
        stopped: set when the call is cancelled, or one of its datasets has failed.
    """

    call: ToolCall
    tool_context: ToolContext
    spark: SparkSession
    stored: Mapping[str, InputRows]
    layout: Layout
    program: Program | None
    rendered: Mapping[str, Any]
    staging: Staging | None = None
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        call, self.settings = self.call, self.tool_context.settings
        self.scope = LiveScope(call.scope, self.tool_context, asyncio.get_running_loop())
        self.group = f"{call.execution_id} {call.step}.{call.task.name} {call.command_id} {call.attempt}"

    def tell(self, message: str) -> None:
        """Reports progress."""
        self.tool_context.progress(self.call, message)

    def perform(self) -> tuple[Any, dict[str, Written], Metrics]:
        """Does everything that blocks: makes DataFrames of the inputs, runs the user's code, writes. Runs in a thread.

        Returns:
            The value, or None if the result is a single dataset; datasets by name, not registered yet; metrics.
        """
        try:
            task = f"{self.call.step}.{self.call.task.name}"
            session = sessions.own_session(self.spark, self.settings, self.group, task)
            self.staging = staging_for(session, self.settings, self.stopped, self.tell)
            if not sessions.is_classic(session):
                report_connected(session, self.tell)
            value, datasets = self._kept(self._result(session))
            return value, datasets, metrics_of(self.spark, self.group)
        except Exception as error:
            lost = isinstance(error, IntegrityError | ReferenceNotAvailableError)
            if isinstance(error, ToolError | StorageError) and not lost:
                raise
            raise self._tool_error(error) from error
        finally:
            sessions.release(self.group)
            if self.staging is not None:
                self.staging.close()

    def _result(self, spark: SparkSession) -> Any:
        """Returns what the SQL or the function gives: a DataFrame, or any other value."""
        call, config = self.call, self.call.config
        has_sql = bool(config.get("command"))
        inputs = inputs_of(spark, call, self.stored, self.settings, self.staging, rows_too=has_sql)
        if has_sql:
            return self._sql_result(spark, inputs)
        values = {"spark": spark, **inputs}
        if self.program is not None:
            return run_program(
                self.program,
                values,
                self.scope,
                libs=config.get("libs"),
                context=self.scope.context,
                printer=Printed(call.step),
                rendered=self.rendered,
            )
        address = str(config["function"])
        source, _, name = address.rpartition(":")
        if source.endswith(".py"):
            address = f"{script_file(source, call, self.tool_context)}:{name}"
        return call_main(load_function(address, call.folder), values, {}, self.scope.context)

    def _sql_result(self, spark: SparkSession, inputs: Mapping[str, Any]) -> DataFrame:
        for name, value in inputs.items():
            if isinstance(value, DataFrame):
                value.createOrReplaceTempView(name)
        command = self.call.config["command"]
        texts = [command] if isinstance(command, str) else list(command)
        frame = None
        for statement in (statement for text in texts for statement in split_spark_statements(text)):
            frame = spark.sql(statement, args=self.call.config.get("params") or None)
        if frame is None:
            raise self.call.error("'sql' holds no statement")
        return frame

    def _kept(self, value: Any) -> tuple[Any, dict[str, Written]]:
        """Writes the DataFrames of a result, or collects them. Returns the value and the datasets, by name."""
        if self.call.config.get("collect"):
            most = self._most_rows()
            if isinstance(value, DataFrame):
                return self._collected(value, most), {}
            if isinstance(value, Mapping):
                return admit({name: self._collected(item, most) for name, item in value.items()}), {}
        name = self.call.task.spec.result.name or self.call.task.name
        if isinstance(value, DataFrame):
            return None, {name: self._written(value, name)}
        items = value.items() if isinstance(value, Mapping) else ()
        if frames := {key: item for key, item in items if isinstance(item, DataFrame)}:
            datasets = self._all_written(frames)
            return {key: admit(item) for key, item in items if key not in frames}, datasets
        return value if is_table(value) else admit(value), {}

    def _collected(self, value: Any, most: int) -> Any:
        """Returns the rows of a DataFrame; any other value unchanged."""
        if not isinstance(value, DataFrame):
            return value
        rows = json_rows(self._fetched(value, most, "leave out 'collect' to write a dataset"))
        return {"rows": rows, "row_count": len(rows), "columns": value.columns}

    def _most_rows(self) -> int:
        return count_of(self.call, "max_rows") or MOST_COLLECTED_ROWS

    def _fetched(self, frame: DataFrame, most: int, otherwise: str) -> pa.Table:
        table = frame.limit(most + 1).toArrow()
        if table.num_rows > most:
            text = f"more than {most} rows to collect; raise max_rows, or {otherwise}"
            raise self.call.error(text, "transform")
        return table

    def _all_written(self, frames: Mapping[str, DataFrame]) -> dict[str, Written]:
        """Writes several in parallel: Spark fills the cores that the last tasks of one job leave idle.

        If one fails, the others are cancelled and all files are removed.
        """
        with ThreadPoolExecutor(MOST_WRITES, thread_name_prefix="noetl-spark-write") as threads:
            # the job group belongs to the thread that set it; this passes it on
            write = inheritable_thread_target(self.spark)(self._written)
            futures = {name: threads.submit(write, frame, name) for name, frame in frames.items()}
            try:
                return {name: future.result() for name, future in futures.items()}
            except BaseException:
                self.stopped.set()
                sessions.cancel(self.spark, self.group)
                for future in futures.values():
                    future.cancel()
                    with suppress(BaseException):
                        locations.remove_below(self.settings, future.result().uri)
                raise

    def _written(self, frame: DataFrame, name: str) -> Written:
        """Writes a dataset to its folder; for a tier of single objects returns the rows, which fit in memory."""
        sessions.activate(frame.sparkSession)
        tier = self.layout.tier_for(self.settings)
        if tier not in IN_PLACE:
            otherwise = f"choose minio or pvc: tier {tier.value} holds single objects"
            return self._fetched(frame, self._most_rows(), otherwise)
        uri = self.tool_context.results.dataset_uri(**self._whose(name), tier=tier)
        return write_dataset(frame, self.settings, uri, self.layout, self.staging)

    def _whose(self, name: str) -> dict[str, Any]:
        return {"execution_id": self.call.execution_id, "step": self.call.step, "name": name}

    async def published(self, value: Any, datasets: Mapping[str, Written], metrics: Metrics) -> ToolResult:
        """Registers the written datasets, which makes them visible."""
        store, layout, refs = self.tool_context.results, self.layout, {}
        for name, written in datasets.items():
            if isinstance(written, WrittenDataset):
                refs[name] = await register(written, store, layout, **self._whose(name))
            else:
                tier = layout.tier_for(self.settings)
                refs[name] = await store.put(written, **self._whose(name), tier=tier)
        stored_bytes = sum(ref.bytes_size for ref in refs.values())
        details = {"spark": metrics | {"output_bytes": stored_bytes}} if metrics else {}
        if not refs:
            return ToolResult(data=value, details=details)
        if value is None:
            (ref,) = refs.values()
            await _report_parts(ref, self.call, self.tool_context)
            return ToolResult(ref=ref, details=details)
        dumped = {name: ref.model_dump(mode="json", exclude_defaults=True) for name, ref in refs.items()}
        return ToolResult(data={**value, **dumped}, details=details)

    def _tool_error(self, error: Exception) -> ToolError:
        """Returns the failure in a few lines; of playbook code with its exception and line."""
        in_code = isinstance(error, CodeFailure)
        cause = error.__context__ if in_code and error.__context__ is not None else error
        failure = failure_of(cause)
        if isinstance(cause, NoetlError):
            kind = cause.kind
        else:
            own = in_code and failure.kind == "transform" and failure.code is None
            kind = "python" if own else failure.kind
        line = f" (line {error.line} of the code)" if isinstance(error, CodeFailure) and error.line else ""
        stage = failed_stage(self.spark, self.group)
        where = f"spark in step {self.call.step}{', ' if stage else ''}{stage}"
        name = type(cause).__name__
        named = "" if isinstance(cause, NoetlError | RefusedValueError) else f" {name}:"
        return ToolError(
            f"{where}:{named} {failure.message}{line}",
            kind=kind,
            retryable=failure.retryable,
            code=failure.code,
            details={"py": {"exception_type": name}},
        )


async def _report_parts(
    dataset: ResultRef, call: ToolCall, context: ToolContext, recorded: Sequence[Chunk] = ()
) -> None:
    """Reports the files that Spark has written as chunks, after those in the log, if a step consumes them.

    No row passes through the driver. Only Parquet has chunks; Spark alone reads the other formats.
    """
    chunks = context.chunks
    if not chunks.wanted(call) or dataset.content_type != codec.PARQUET:
        return
    at = {"dataset": dataset.ref}
    if dataset.kind is not RefKind.DATASET:  # of a tier of single objects
        if not recorded:
            await chunks.record(call, Chunk(0, dataset, at, more=False))
        return
    uri = dataset.physical_uri
    filesystem, base = await asyncio.to_thread(locations.arrow_filesystem, context.settings, uri)
    sizes = await asyncio.to_thread(sizes_of_files, context.settings, uri)
    files = sorted(sizes)
    for place in range(len(recorded), len(files)):
        file = files[place]
        path = f"{base.rstrip('/')}/{file}"
        footer = await asyncio.to_thread(pq.read_metadata, path, filesystem=filesystem)
        part = await context.results.register_part(
            dataset,
            file,
            name=f"{dataset.name}-chunk-{place}",
            bytes_size=sizes[file],
            rows=footer.num_rows,
        )
        await chunks.record(call, Chunk(place, part, at, more=place < len(files) - 1))
