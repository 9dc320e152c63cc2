"""``status``, ``events``, ``executions`` and ``cancel``."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import orjson
import typer
from rich.table import Column, Table
from rich.text import Text

from noetl_dagster.cli.completion import complete_executions
from noetl_dagster.cli.console import Json, console, ended_by_interrupt, note, note_page, print_json
from noetl_dagster.cli.progress import loop_text, watch
from noetl_dagster.cli.session import open_session
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.listing import ExecutionFilter, list_executions
from noetl_dagster.engine.executions.overview import Overview, StepView, full_overview, overview
from noetl_dagster.engine.executions.progress import MOST_WAITING, PoolView, brief, per_second
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.commit_order import START, follow, position_of
from noetl_dagster.events.projection import read_execution
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.transport.queries import no_worker
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.process.event_loop import run_sync

ExecutionId = Annotated[
    int,
    typer.Argument(
        min=1,
        max=2**63 - 1,
        help="the id that 'run' printed",
        metavar="EXECUTION_ID",
        autocompletion=complete_executions,
    ),
]

RESULT_CHARACTERS = 70

COLOURS = {"COMPLETED": "green", "FAILED": "red", "CANCELLED": "yellow", "RUNNING": "cyan", "SKIPPED": "dim"}


def status(
    execution_id: ExecutionId,
    watched: Annotated[
        bool, typer.Option("--watch", "-w", help="show progress until it ends; exit code 0 if it completes, else 1")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the state of an execution: its steps, loops and pool commands."""
    with open_session(quickly=True) as session, ended_by_interrupt():
        if watched:
            run_sync(overview(session.engine.runtime, execution_id))  # fails if there is none
            watch(session.engine, execution_id, quiet=as_json)
        execution = run_sync(full_overview(session.engine.runtime, execution_id))
        if as_json:
            print_json(execution)
        else:
            show(execution)
            note_page(session.settings, execution_id)
            if execution.status == "RUNNING" and not run_sync(session.engine.liveness.is_driven(execution_id)):
                _note_undriven(session.engine, execution_id)
    if watched and execution.status != ExecutionStatus.COMPLETED:
        raise typer.Exit(1)


def events(
    execution_id: ExecutionId,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per line")] = False,
    after: Annotated[int, typer.Option(help="only events after this event id")] = 0,
    followed: Annotated[
        bool,
        typer.Option("--follow", "-f", help="print new events too, until it ends, in the order of their commits"),
    ] = False,
) -> None:
    """Print every event of an execution, oldest first."""
    with open_session(quickly=True) as session, ended_by_interrupt():
        if followed:
            run_sync(_follow_events(session.engine, execution_id, after, as_json))
            return
        has_printed = run_sync(_print_events(session.engine, execution_id, after, as_json))
    if not has_printed and after == 0:
        raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")


def listing(
    limit: Annotated[int, typer.Option(min=1, help="number of executions")] = 20,
    partition: Annotated[str | None, typer.Option(help="only executions of this partition")] = None,
    asset: Annotated[str | None, typer.Option(help="only executions that produced this asset, as a/b")] = None,
    as_json: Json = False,
) -> None:
    """List the newest executions."""
    with open_session(quickly=True) as session:
        pool = session.engine.runtime.pool
        wanted = ExecutionFilter(partition=partition, asset=asset)
        executions = run_sync(list_executions(pool, wanted, limit, seconds=None))
    if as_json:
        names = ("playbook", "partition", "status", "started_at", "ended_at")
        print_json(
            [
                {"execution_id": str(one.execution_id), **{name: getattr(one, name) for name in names}}
                for one in executions
            ]
        )
        return
    parted = any(one.partition for one in executions)
    table = Table("execution", "playbook", *(["partition"] if parted else []), "started", "state", box=None)
    for one in executions:
        started = f"{one.started_at:%Y-%m-%d %H:%M:%S}"
        own = [one.partition or ""] if parted else []
        table.add_row(str(one.execution_id), one.playbook, *own, started, _coloured(one.status))
    console.print(table)
    note_page(session.settings)


def cancel(
    execution_id: ExecutionId,
    reason: Annotated[str, typer.Option(help="reason, which the log records")] = "cancelled on request",
) -> None:
    """Cancel an execution: it starts no new commands, and its running commands are notified."""
    with open_session(quickly=True) as session:
        done = run_sync(session.engine.lifecycle.cancel(execution_id, reason))
    typer.echo(f"execution {execution_id} " + ("is cancelled" if done else "had ended already"))


def show(execution: Overview) -> None:
    """Prints an execution as a table."""
    console.print(
        f"execution [bold]{execution.execution_id}[/]  {execution.playbook}  {_coloured(execution.status)}  "
        f"{execution.seconds:.1f} s",
        highlight=False,
    )
    table = Table("step", "state", "iterations", Column("result", overflow="fold"), box=None)
    for step in execution.steps:
        outcome = Text(_outcome(step, execution))
        table.add_row(step.step, _coloured(step.status), loop_text(step.loop, step.chunks), outcome)
    console.print(table)
    if any(step.checks for step in execution.steps):
        console.print(check_table(execution))
    for step in execution.steps:
        if (moved := step.watermark) is not None:
            was = "" if moved.previous is None else f", from {moved.previous}"
            console.print(f"{step.step} has loaded up to {moved.value}{was}", markup=False, highlight=False)
    if any(step.pool for step in execution.steps):
        console.print(_pool_table(execution))
    for pool in dict.fromkeys(step.pool.unattended for step in execution.steps if step.pool is not None):
        if pool is not None:
            console.print(f"warning: {no_worker(pool)}", style="yellow", markup=False)
    for warning in execution.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if execution.error:
        console.print(execution.error, style="red", markup=False, highlight=False)


def check_table(execution: Overview) -> Table:
    """Builds the table of the check results of each step."""
    table = Table("check", "of", "", Column("why", overflow="fold"), box=None)
    for step in execution.steps:
        for check in step.checks:
            state, colour = ("passed", "green") if check.passed else ("failed", "red")
            if not check.passed and check.severity == "warn":
                state, colour = "warning", "yellow"
            table.add_row(check.name, step.step, f"[{colour}]{state}[/]", Text(check.why or ""))
    return table


def _note_undriven(engine: Engine, execution_id: int) -> None:
    """Says that no process drives an execution, what recovery has done about it, and what it does next."""
    now = time.time()
    one = run_sync(engine.recovery().judge(execution_id, now=now))
    note(f"no process runs it now; to resume it: noetl-dagster resume {execution_id}")
    if one is None or one.attempts == 0:
        return
    most = engine.runtime.settings.recovery_attempts
    what = "ends it" if one.attempts >= most else "resumes it again"
    when = f"in {one.due - now:.0f} s" if one.due > now else "now"
    note(f"recovery has resumed it ({one.attempts} of {most} times); it {what} {when}")


def _pool_table(execution: Overview) -> Table:
    """Builds the table of the pool's steps. The times are those of the latest commands."""
    table = Table("pool", "waiting", "running", "ended", "queue p50", "p99", "run p50", "p99", box=None)
    for step in execution.steps:
        if step.pool is not None:
            table.add_row(step.step, *_pool_figures(step.pool))
    return table


def _pool_figures(pool: PoolView) -> list[str]:
    waiting = f"{pool.waiting}+" if pool.waiting >= MOST_WAITING else str(pool.waiting)
    rate = "" if pool.rate is None else per_second(pool.rate)
    times = (pool.queue_p50, pool.queue_p99, pool.run_p50, pool.run_p99)
    return [waiting, str(pool.running), rate, *("" if one is None else brief(one) for one in times)]


def _outcome(step: StepView, execution: Overview) -> str:
    """Summarises a step's end in one line; the error of the execution itself is printed below the table."""
    if step.error:
        return "" if execution.error and step.error in execution.error else step.error
    if step.result:
        return step.result
    data = [_item(one) for one in step.data] if isinstance(step.data, list) else step.data
    text = json.dumps(data, ensure_ascii=False) if step.status == "COMPLETED" and data not in (None, {}) else ""
    return text if len(text) <= RESULT_CHARACTERS else text[: RESULT_CHARACTERS - 1] + "…"


def _item(data: Any) -> Any:
    """Returns the address of a stored result of an iteration, and others as they are."""
    is_stored = isinstance(data, dict) and data.keys() == {"ref"} and isinstance(data["ref"], dict)
    return data["ref"].get("physical_uri", data) if is_stored else data


def _coloured(state: str) -> str:
    return f"[{COLOURS.get(state, 'default')}]{state}[/]"


async def _print_events(engine: Engine, execution_id: int, after: int, as_json: bool) -> bool:
    has_printed = False
    async for event in engine.runtime.log.events(execution_id, after=after):
        typer.echo(_as_line(event, as_json))
        has_printed = True
    return has_printed


async def _follow_events(engine: Engine, execution_id: int, after: int, as_json: bool) -> None:
    pool = engine.runtime.pool
    position = await position_of(pool, execution_id, after) if after else START
    if position is None:
        raise ExecutionNotFoundError(f"execution {execution_id} has no event {after}")
    if await read_execution(pool, execution_id) is None:
        raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
    async for event in follow(pool, execution_id, position):
        typer.echo(_as_line(event, as_json))


def _as_line(event: Event, as_json: bool) -> str:
    if as_json:
        fields = {name: getattr(event, name) for name in Event.__slots__}
        for name in ("execution_id", "event_id", "parent_execution_id", "catalog_id"):
            fields[name] = str(fields[name]) if fields[name] is not None else None
        return orjson.dumps(fields, default=str).decode()
    index = f"[{event.current_index}]" if event.current_index is not None else ""
    when = f"{event.created_at:%H:%M:%S.%f}"[:-3] if event.created_at else ""
    error = f"  {event.error}" if event.error else ""
    chunk = ""
    if event.event_type == EventType.CALL_PARTIAL:
        rows = "" if event.meta.get("row_count") is None else f", {event.meta['row_count']} rows"
        last = "" if event.meta.get("has_more") else ", the last"
        chunk = f"  chunk {event.meta.get('chunk_index')}{rows}{last}"
    return f"{when}  {event.event_id}  {event.event_type:<24} {event.node_name or ''}{index}{chunk}{error}"
