"""``verify``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from noetl_dagster import embedded
from noetl_dagster.cli.completion import complete_executions
from noetl_dagster.cli.console import Json, announce_start, console, fail, note, print_json, warn
from noetl_dagster.engine.recovery import verify as checking
from noetl_dagster.engine.recovery.verify import RULES, Report, forget_missing
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.rules import EXAMPLES, Finding
from noetl_dagster.settings import get_settings

NOTE_SECONDS = 5.0
"""Time between two remarks about the progress."""

UNCHECKED = 2


async def verify(
    execution_id: Annotated[
        int | None,
        typer.Argument(
            min=1, max=2**63 - 1, help="only this execution", show_default=False, autocompletion=complete_executions
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="every execution, and every object of the stores")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="compare the sizes of objects, without reading them")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="repair what is safe to repair")] = False,
    forget: Annotated[
        bool,
        typer.Option("--forget-missing", help="forget missing results, so that resuming makes them again"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check events, the projection, results and stored objects of executions.

    It may run while executions run. The exit code is 0 if nothing is wrong, 1 if something is, and 2 if a part could
    not be checked. --forget-missing makes the commands whose results are missing run again when the execution is
    resumed.
    """
    if (execution_id is None) is not every:
        fail("name the id of one execution, or use --all for every execution", UNCHECKED)
    settings = embedded.ensure(get_settings(), announce=announce_start)
    try:
        runtime = await Runtime.open(settings, apply=False)
        try:
            report = await checking.verify(
                runtime.pool, runtime.results, execution_id, quick=quick, repair=repair, note=_now_and_then()
            )
            if forget and report.missing:
                report.repairs.append(f"object.missing: {await forget_missing(runtime, report.missing)}")
        finally:
            await runtime.close()
    except (LookupError, ServiceError, *DATABASE_AWAY) as error:
        fail(f"nothing was checked: {error.args[0] if error.args else error}", UNCHECKED)
    if as_json:
        print_json(_as_json(report))
    else:
        _show(report)
    if report.unchecked:
        raise typer.Exit(UNCHECKED)
    if report.findings.counts:
        raise typer.Exit(1)


def _now_and_then() -> Callable[[str], None]:
    """Returns a function that prints the progress every few seconds."""
    last = time.monotonic()

    def show(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > NOTE_SECONDS:
            last = time.monotonic()
            note(text)

    return show


def _show(report: Report) -> None:
    """Prints the findings as a table, and what each kind means."""
    megabytes = f", {report.bytes / 1e6:,.1f} MB read" if report.bytes else ""
    console.print(
        f"checked: {report.executions} executions, {report.references} stored results{megabytes}", markup=False
    )
    for tier, count in report.skipped.items():
        note(f"{count} results of the tier {tier} are not checked: this process does not have that store")
    for store, why in report.unchecked.items():
        warn(f"warning: the tier {store} could not be checked: {why}")
    if not report.findings.counts:
        console.print("nothing is wrong" + (" in what could be checked" if report.unchecked else ""))
        return
    table = Table("finding", "execution", "step", "item", "place", box=None)
    for rule, examples in report.findings.examples.items():
        for one in examples:
            item = "" if one.iteration is None else str(one.iteration)
            cells = (rule, str(one.execution_id or ""), one.step or "", item, one.place)
            table.add_row(*(Text(cell, overflow="fold") for cell in cells))
        if (more := report.findings.counts[rule] - len(examples)) > 0:
            table.add_row(rule, f"and {more} more")
    console.print(table)
    for rule, count in report.findings.counts.items():
        console.print(f"\n{rule} ({count}): {RULES[rule].what}.\n  {RULES[rule].fix}", markup=False)
    for line in report.repairs:
        console.print(f"repaired: {line}", markup=False)


def _as_json(report: Report) -> dict[str, object]:
    """Returns the report for programs; each finding has at most as many examples as the text has."""
    return {
        "executions": report.executions,
        "references": report.references,
        "bytes": report.bytes,
        "findings": [
            {
                "rule": rule,
                "count": count,
                "what": RULES[rule].what,
                "fix": RULES[rule].fix,
                "examples": [_place(one) for one in report.findings.examples[rule][:EXAMPLES]],
            }
            for rule, count in report.findings.counts.items()
        ],
        "unchecked": report.unchecked,
        "skipped": report.skipped,
        "repairs": report.repairs,
    }


def _place(finding: Finding) -> dict[str, object]:
    execution = None if finding.execution_id is None else str(finding.execution_id)
    return {"execution_id": execution, "step": finding.step, "iteration": finding.iteration, "place": finding.place}
