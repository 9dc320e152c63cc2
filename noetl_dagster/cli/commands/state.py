"""``state``: how far the steps of a playbook have loaded their sources, and from where they continue."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from noetl_dagster.cli.console import Json, console, fail, print_json, warn
from noetl_dagster.cli.session import open_session
from noetl_dagster.engine.steps.watermarks import Watermark, set_watermark, watermarks
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.wording import is_template
from noetl_dagster.process.event_loop import run_sync

app = typer.Typer(no_args_is_help=True, add_completion=False)

Path = Annotated[str, typer.Argument(help="metadata.path of the playbook", metavar="PATH")]
Step = Annotated[str, typer.Argument(help="name of the step, or of its state", metavar="STEP")]
Partition = Annotated[str, typer.Option(help="key of a partition, if the playbook has partitions")]


@app.command()
def show(path: Path, as_json: Json = False) -> None:
    """Show how far each step of a playbook has loaded."""
    with open_session(quickly=True) as session:
        marks = run_sync(watermarks(session.engine.runtime.pool, path))
    if as_json:
        print_json([asdict(one) | {"execution_id": _shown(one.execution_id, "") or None} for one in marks])
        return
    if not marks:
        console.print(f"playbook {path} has not loaded anything under a 'state'", markup=False)
        return
    parted = any(one.partition for one in marks)
    table = Table("step", *(["partition"] if parted else []), "value", "before", "since", "by", box=None)
    for one in marks:
        own = [one.partition] if parted else []
        values = _shown(one.value, "initial"), _shown(one.previous, "")
        by = _shown(one.execution_id, "hand")
        table.add_row(one.name, *own, *values, f"{one.at:%Y-%m-%d %H:%M:%S}", by)
    console.print(table)


@app.command(name="set")
def set_(
    path: Path,
    step: Step,
    value: Annotated[str, typer.Argument(help="a number, a time in ISO 8601, or a text")],
    partition: Partition = "",
    as_text: Annotated[bool, typer.Option("--text", help="text, even if it looks like a number")] = False,
) -> None:
    """Make the next run of a step continue from a value; executions that have begun no longer change it.

    The step must exist in the playbook, if that is registered or has run.
    """
    with open_session(quickly=True) as session:
        runtime = session.engine.runtime
        before = _of(run_sync(watermarks(runtime.pool, path)), step, partition)
        if before is None:
            _look_up(run_sync(runtime.registered.that_ran(path)), path, step)
        was_text = before is not None and isinstance(before.value, str)
        mark = value if as_text or was_text else _number(value)
        run_sync(set_watermark(runtime.log, path, step, mark, partition=partition))
    was = "" if before is None else f"; it was {_shown(before.value, 'reset')}"
    typer.echo(f"{path}: {step} continues from {mark}{was}")


@app.command()
def reset(path: Path, step: Step, partition: Partition = "") -> None:
    """Make the next run of a step start again from the state's initial value."""
    with open_session(quickly=True) as session:
        runtime = session.engine.runtime
        marks = run_sync(watermarks(runtime.pool, path))
        before = _of(marks, step, partition)
        if before is not None:
            run_sync(set_watermark(runtime.log, path, step, None, partition=partition))
    if before is None:
        names = [one.name + (f" --partition {one.partition}" if one.partition else "") for one in marks]
        loaded = ", ".join(names) or "nothing"
        fail(f"playbook {path} has not loaded anything as {step!r}; it has loaded: {loaded}")
    typer.echo(f"{path}: {step} starts again; it was {_shown(before.value, 'reset')}")


def _look_up(playbook: Playbook | None, path: str, name: str) -> None:
    """Refuses a name under which a playbook stores nothing; warns if the playbook is unknown."""
    if playbook is None:
        warn(f"warning: playbook {path} is not registered and has not run, so {name!r} is not checked")
        return
    states = [step.state.name or step.name for step in playbook.steps if step.state is not None]
    if name not in states and not any(map(is_template, states)):
        fail(f"playbook {path} stores no state as {name!r}; it stores: {', '.join(states) or 'none'}")


def _of(marks: list[Watermark], name: str, partition: str) -> Watermark | None:
    return next((one for one in marks if (one.name, one.partition) == (name, partition)), None)


def _number(text: str) -> int | float | str:
    """Returns the number that a text represents, else the text."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    return text


def _shown(value: object, missing: str) -> str:
    return missing if value is None else str(value)
