"""``kind: spark``: SQL or a Python function over DataFrames, with results of any tier as input."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from noetl_dagster.errors import (
    ErrorKind,
    IntegrityError,
    NoetlError,
    ReferenceNotAvailableError,
    ServiceError,
    StorageError,
    ToolError,
)
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult, count_of
from noetl_dagster.tools.python.code import (
    CodeFailure,
    Printed,
    Program,
    call_main,
    compile_code,
    run_program,
)
from noetl_dagster.tools.python.context import CodeContext, LiveScope
from noetl_dagster.tools.python.threads import CodeThreads
from noetl_dagster.tools.python.tool import rendered_templates
from noetl_dagster.tools.rows.jsonable import NotJsonableError, is_table, to_jsonable
from noetl_dagster.tools.scripts import script_file
from noetl_dagster.tools.spark.inputs import inputs_of, split_spark_statements, stored_inputs
from noetl_dagster.tools.spark.parts import report_parts, resumed_dataset

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from noetl_dagster.spark.datasets import Layout, WrittenDataset
    from noetl_dagster.spark.failures import SparkFailure
    from noetl_dagster.spark.frames import InputRows
    from noetl_dagster.spark.metrics import ConnectMetrics, InputBytes
    from noetl_dagster.spark.staging import Staging

MOST_COLLECTED_ROWS = 10_000
"""Maximum rows that the driver collects, with ``collect: true`` or for a tier of single objects, unless ``max_rows`` is
set."""

MOST_WRITES = 4
"""Datasets of one call that are written in parallel."""

THREADS = 8
"""Calls that wait for Spark in parallel; Spark itself schedules their tasks."""


@dataclass(slots=True)
class _SparkRun:
    """One call, ready for the thread that talks to Spark.

    Attributes:
        stored: inputs that are results, by name.
        layout: how DataFrames are written.
        told: the metrics that a Connect server reports of the call.
        read: the bytes that it reads, as far as they are known.
        scope: the names of the execution, for its code.
        program, rendered: its code, if any, and the values of the templates in it.
        staging: files of the call on this machine's disk, if Spark's tasks run in this process's JVM.
        stopped: set when the call is cancelled, or one of its datasets has failed.
    """

    call: ToolCall
    box: Toolbox
    spark: SparkSession
    group: str
    stored: dict[str, InputRows]
    layout: Layout
    told: ConnectMetrics
    read: InputBytes
    scope: LiveScope
    program: Program | None
    rendered: Mapping[str, Any]
    staging: Staging | None = None
    stopped: threading.Event = field(default_factory=threading.Event)

    def tell(self, message: str) -> None:
        """Reports progress."""
        self.box.progress(self.call, message)


@dataclass(slots=True)
class _Produced:
    """The outcome of a call: a value, and datasets by name that are not registered yet."""

    value: Any = None
    datasets: dict[str, WrittenDataset | pa.Table] = field(default_factory=dict)
    only: str | None = None  # name of the one dataset that is the whole result
    metrics: dict[str, int | float | str] = field(default_factory=dict)


class SparkTool(Tool):
    """Runs SQL or a Python function on the session that the process shares.

    Input: ``from`` names results that Spark reads in place, by step, task or ``task.key``: a list, or
    ``{pages: fetch_pages}`` to give them other names. Values of ``input`` that are references,
    ``{table: name}`` or ``{path, format, options}`` are DataFrames too; for SQL also lists of rows. JSON
    results have one text column ``value`` with one element per row, unless ``schemas: {name: "a INT" | infer}``
    is set; SQL infers.

    Then one of ``sql`` (every DataFrame is a view; the rows of the last statement are the result; ``params``
    binds ``:name``), ``function`` (``"file.py:name"``) and ``code`` (defines ``main`` or leaves ``result``).
    Functions get ``spark`` and the inputs by parameter name.

    Output: a DataFrame becomes a dataset (``format``, ``partition_by``, ``tier``, ``options``), on tiers of
    single objects such as kv one Parquet object of at most ``max_rows``; a mapping with DataFrames in it
    becomes a mapping with references instead, any other value is unchanged. With ``collect: true`` a
    DataFrame becomes ``{rows, row_count, columns}`` with at most ``max_rows`` rows. A step that consumes chunks gets
    the files of a dataset one by one, after Spark has written all of them. The
    envelope's ``spark`` contains metrics, see :func:`noetl_dagster.spark.metrics.metrics_of`.

    Raises ``ToolError``, retryable when an executor, the JVM or the connection was lost.
    """

    kind = "spark"

    def __init__(self) -> None:
        self._threads = CodeThreads(THREADS)

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        """Runs the call, or only reports the rest of a dataset that an earlier run has written."""
        from noetl_dagster.spark.metrics import ConnectMetrics, InputBytes

        _check(call)
        dataset, told = await resumed_dataset(call, box)
        if dataset is not None:
            await report_parts(dataset, call, box, told)
            return ToolResult(ref=dataset)
        stored = await stored_inputs(call, box)
        layout = _layout(call)
        if not call.config.get("collect"):
            await box.results.ready(layout.tier_for(box.settings))
        try:
            spark = await self._threads.run(box.spark)
        except ServiceError as error:
            raise ToolError(str(error), kind=error.kind, retryable=True) from error
        group = f"{call.execution_id} {call.step}.{call.task.name} {call.command_id} {call.attempt}"
        program, rendered = await _program(call, box)
        scope = LiveScope(call.scope, box, asyncio.get_running_loop())
        run = _SparkRun(
            call, box, spark, group, stored, layout, ConnectMetrics(), InputBytes(), scope, program, rendered
        )
        produced = await self._watched(run)
        return await _published(produced, run)

    async def _watched(self, run: _SparkRun) -> _Produced:
        """Runs in a thread and reports progress; cancels Spark's jobs if it is cancelled."""
        from noetl_dagster.spark import progress, sessions

        try:
            async with progress.reporting(run.spark, run.group, run.tell):
                produced: _Produced = await self._threads.run(partial(_perform, run))
                return produced
        except asyncio.CancelledError:
            run.stopped.set()
            await asyncio.shield(asyncio.to_thread(sessions.cancel, run.spark, run.group))
            raise


def _check(call: ToolCall) -> None:
    ways = [way for way in ("command", "function", "code") if call.config.get(way)]
    if len(ways) != 1:
        found = " and ".join(ways) or "none"
        raise ToolError(
            f"spark in step {call.step} needs one of sql, function and code; it has {found}", kind="schema"
        )


async def _program(call: ToolCall, box: Toolbox) -> tuple[Program | None, Mapping[str, Any]]:
    source = str(call.config.get("code") or "")
    if not source:
        return None, {}
    try:
        program = compile_code(source, f"{call.step}.{call.task.name}")
    except CodeFailure as failure:
        message = f"spark in step {call.step}: {failure} (line {failure.line} of the code)"
        details = {"py": {"exception_type": failure.exception_type}}
        raise ToolError(message, kind="python", details=details) from None
    return program, await rendered_templates(program, source, call, box)


def _layout(call: ToolCall) -> Layout:
    from noetl_dagster.spark.datasets import Layout

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
        raise ToolError(f"spark in step {call.step}: {error}", kind="schema") from error


def _perform(run: _SparkRun) -> _Produced:
    """Does everything that blocks: makes DataFrames of the inputs, runs the user's code, writes. Runs in a thread."""
    from noetl_dagster.spark.metrics import metrics_of
    from noetl_dagster.spark.progress import report_connected
    from noetl_dagster.spark.sessions import is_classic, own_session, release
    from noetl_dagster.spark.staging import staging_for

    try:
        settings, task = run.box.settings, f"{run.call.step}.{run.call.task.name}"
        session = own_session(run.spark, settings, run.group, task)
        run.staging = staging_for(session, settings, run.stopped, run.tell)
        classic = is_classic(session)
        if not classic:
            report_connected(session, run.tell, run.told)
        produced = _kept(_result(session, run), run)
        metrics = metrics_of(run.spark, run.group) if classic else run.told.metrics()
        produced.metrics = _with_bytes(metrics, produced, run, session)
        return produced
    except ToolError:
        raise
    except Exception as error:
        if isinstance(error, StorageError) and not isinstance(
            error, IntegrityError | ReferenceNotAvailableError
        ):
            raise
        raise _tool_error(error, run) from error
    finally:
        release(run.group)
        if run.staging is not None:
            run.staging.close()


def _with_bytes(
    metrics: dict[str, int | float | str], produced: _Produced, run: _SparkRun, session: SparkSession
) -> dict[str, int | float | str]:
    """Returns metrics with the bytes that were really read and written; unknown ones are left out."""
    from noetl_dagster.spark.datasets import WrittenDataset
    from noetl_dagster.spark.sessions import is_classic

    found = dict(metrics)
    counted = found.pop("input_bytes", None)
    read = run.read.total(None if counted is None else int(counted), session)
    if read is not None:
        found["input_bytes"] = read
    own = [one for one in produced.datasets.values() if isinstance(one, WrittenDataset)]
    if is_classic(session):
        own = [one for one in own if one.by_source]  # Spark has counted the others
    if metrics:
        found["output_bytes"] = int(found.get("output_bytes", 0)) + sum(one.bytes_size for one in own)
    return found


def _result(spark: SparkSession, run: _SparkRun) -> Any:
    call = run.call
    if call.config.get("command"):
        return _sql_result(spark, run)
    values = {
        "spark": spark,
        **inputs_of(spark, run.call, run.stored, run.box.settings, run.staging, run.read),
    }
    printer = Printed(call.step, run.box.credentials.redact)
    if call.config.get("code"):
        assert run.program is not None
        return run_program(
            run.program,
            values,
            run.scope,
            libs=call.config.get("libs"),
            context=lambda: CodeContext(run.scope),
            printer=printer,
            rendered=run.rendered,
        )
    from noetl_dagster.spark.functions import load_function

    address = str(call.config["function"])
    source, _, name = address.rpartition(":")
    if source.endswith(".py"):
        address = f"{script_file(source, call, run.box)}:{name}"
    function = load_function(address, call.folder)
    return call_main(function, values, {}, lambda: CodeContext(run.scope))


def _sql_result(spark: SparkSession, run: _SparkRun) -> DataFrame:
    from pyspark.sql import DataFrame

    inputs = inputs_of(spark, run.call, run.stored, run.box.settings, run.staging, run.read, rows_too=True)
    for name, value in inputs.items():
        if isinstance(value, DataFrame):
            value.createOrReplaceTempView(name)
    given = run.call.config["command"]
    texts = [given] if isinstance(given, str) else list(given)
    statements = [statement for text in texts for statement in split_spark_statements(text)]
    parameters = run.call.config.get("params") or None
    frame = None
    for statement in statements:
        frame = spark.sql(statement, args=parameters)
    if frame is None:
        raise ToolError(f"spark in step {run.call.step}: 'sql' holds no statement", kind="schema")
    return frame


def _kept(value: Any, run: _SparkRun) -> _Produced:
    """Writes the DataFrames of a result, or collects them."""
    from pyspark.sql import DataFrame

    config = run.call.config
    if config.get("collect"):
        most = count_of(run.call, "max_rows") or MOST_COLLECTED_ROWS
        if isinstance(value, DataFrame):
            return _Produced(_collected(value, most, run))
        if isinstance(value, Mapping):
            rows = {
                name: _collected(item, most, run) if isinstance(item, DataFrame) else item
                for name, item in value.items()
            }
            return _Produced(to_jsonable(rows))
    name = run.call.task.spec.result.name or run.call.task.name
    if isinstance(value, DataFrame):
        return _Produced(datasets={name: _written(value, name, run)}, only=name)
    if isinstance(value, Mapping) and any(isinstance(item, DataFrame) for item in value.values()):
        frames = {key: item for key, item in value.items() if isinstance(item, DataFrame)}
        datasets = _all_written(frames, run)
        others = {key: to_jsonable(item) for key, item in value.items() if key not in datasets}
        return _Produced(others, datasets)
    return _Produced(value if is_table(value) else to_jsonable(value))


def _collected(frame: DataFrame, most: int, run: _SparkRun) -> dict[str, Any]:
    rows = _fetched(frame, most, run, "leave out 'collect' to write a dataset").to_pylist()
    return {"rows": to_jsonable(rows), "row_count": len(rows), "columns": frame.columns}


def _fetched(frame: DataFrame, most: int, run: _SparkRun, otherwise: str) -> pa.Table:
    from noetl_dagster.spark.sessions import is_classic

    wanted = frame.limit(most + 1)
    table = wanted.toArrow()
    if not is_classic(run.spark):
        run.told.add_query(wanted.executionInfo)
    if table.num_rows > most:
        raise ToolError(
            f"spark in step {run.call.step}: more than {most} rows to collect; raise max_rows, or {otherwise}",
            kind="transform",
        )
    return table


def _all_written(frames: dict[str, DataFrame], run: _SparkRun) -> dict[str, WrittenDataset | pa.Table]:
    """Writes several in parallel: Spark fills the cores that the last tasks of one job leave idle.

    If one fails, the others are cancelled and all files are removed.
    """
    from pyspark import inheritable_thread_target

    from noetl_dagster.spark import sessions

    written: dict[str, WrittenDataset | pa.Table] = {}
    with ThreadPoolExecutor(MOST_WRITES, thread_name_prefix="noetl-spark-write") as threads:
        # the job group belongs to the thread that set it; this passes it on
        write = inheritable_thread_target(run.spark)(_written)
        futures = {name: threads.submit(write, frame, name, run) for name, frame in frames.items()}
        try:
            for name, future in futures.items():
                written[name] = future.result()
        except BaseException:
            run.stopped.set()
            sessions.cancel(run.spark, run.group)
            for future in futures.values():
                future.cancel()
                with suppress(BaseException):
                    locations.remove_below(run.box.settings, future.result().uri)
            raise
    return written


def _written(frame: DataFrame, name: str, run: _SparkRun) -> WrittenDataset | pa.Table:
    """Writes a dataset to its folder; for a tier of single objects returns the rows, which fit in memory."""
    from noetl_dagster.spark.datasets import write_dataset
    from noetl_dagster.spark.sessions import activate

    activate(frame.sparkSession)
    settings = run.box.settings
    if not run.layout.has_folder(settings):
        most = count_of(run.call, "max_rows") or MOST_COLLECTED_ROWS
        tier = run.layout.tier_for(settings).value
        return _fetched(frame, most, run, f"choose minio or pvc: tier {tier} holds single objects")
    uri = run.box.results.dataset_uri(
        execution_id=run.call.execution_id,
        step=run.call.step,
        name=name,
        tier=run.layout.tier_for(settings),
    )
    return write_dataset(frame, settings, uri, run.layout, run.staging)


async def _published(produced: _Produced, run: _SparkRun) -> ToolResult:
    """Registers the written datasets, which makes them visible."""
    refs = {name: await _registered(written, name, run) for name, written in produced.datasets.items()}
    single = [ref.bytes_size for ref in refs.values() if ref.kind is not RefKind.DATASET]
    if single and "output_bytes" in produced.metrics:  # objects that the driver has stored
        produced.metrics["output_bytes"] = int(produced.metrics["output_bytes"]) + sum(single)
    details = {"spark": produced.metrics} if produced.metrics else {}
    if produced.only is not None:
        await report_parts(refs[produced.only], run.call, run.box)
        return ToolResult(ref=refs[produced.only], details=details)
    if not refs:
        return ToolResult(data=produced.value, details=details)
    dumped = {name: ref.model_dump(mode="json", exclude_defaults=True) for name, ref in refs.items()}
    return ToolResult(data={**produced.value, **dumped}, details=details)


async def _registered(written: WrittenDataset | pa.Table, name: str, run: _SparkRun) -> ResultRef:
    from noetl_dagster.spark.datasets import WrittenDataset, register

    store, layout = run.box.results, run.layout
    whose: Any = {"execution_id": run.call.execution_id, "step": run.call.step, "name": name}
    if isinstance(written, WrittenDataset):
        return await register(written, store, layout, **whose)
    return await store.put(written, **whose, tier=layout.tier_for(run.box.settings))


def _tool_error(error: Exception, run: _SparkRun) -> ToolError:
    """Returns the failure in a few lines; of playbook code with its exception and line."""
    from noetl_dagster.spark.failures import failure_of
    from noetl_dagster.spark.progress import failed_stage

    cause = error.__context__ if isinstance(error, CodeFailure) and error.__context__ is not None else error
    failure = failure_of(cause)
    line = f" (line {error.line} of the code)" if isinstance(error, CodeFailure) and error.line else ""
    stage = failed_stage(run.spark, run.group)
    where = f"spark in step {run.call.step}{', ' if stage else ''}{stage}"
    name = type(cause).__name__
    named = "" if isinstance(cause, NoetlError | NotJsonableError) else f" {name}:"
    return ToolError(
        f"{where}:{named} {failure.message}{line}",
        kind=_kind_of(cause, failure, in_code=isinstance(error, CodeFailure)),
        retryable=failure.retryable,
        code=failure.code,
        details={"py": {"exception_type": name}},
    )


def _kind_of(cause: BaseException, failure: SparkFailure, *, in_code: bool) -> ErrorKind:
    """Returns the kind of a failure; exceptions of the playbook's own code are of kind ``python``."""
    if isinstance(cause, NoetlError):
        return cause.kind
    return "python" if in_code and failure.kind == "transform" and failure.code is None else failure.kind
