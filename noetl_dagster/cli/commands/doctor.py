"""``doctor``: what is wrong with the settings and with what they lead to."""

from __future__ import annotations

import asyncio

import typer
from rich.markup import escape
from rich.table import Column, Table

from noetl_dagster import embedded
from noetl_dagster.cli.commands.executions import Json
from noetl_dagster.cli.console import console, print_json
from noetl_dagster.cli.doctor.examination import examine
from noetl_dagster.cli.doctor.finding import Finding, State, ok, wrong
from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings, get_settings

COLOURS = {State.OK: "green", State.WARNING: "yellow", State.WRONG: "red", State.NOT_SET: "dim"}


def doctor(as_json: Json = False) -> None:
    """Try every address, credential, folder and program of the settings; exit code 1 when something is wrong."""
    settings, services = _with_services(get_settings())
    found = [*services, *asyncio.run(examine(settings))]
    healthy = all(one.state is not State.WRONG for _, one in found)
    if as_json:
        print_json({"ok": healthy, "checks": [_as_json(name, one) for name, one in found]})
    else:
        console.print(_table(found))
    raise typer.Exit(0 if healthy else 1)


def _with_services(settings: Settings) -> tuple[Settings, list[tuple[str, Finding]]]:
    """The settings as every command gets them: embedded services take the place of addresses that are not set."""
    try:
        filled = embedded.ensure(settings)
    except ServiceError as error:
        what = " ".join(str(error).split())
        return settings, [
            ("embedded services", wrong(what, "see the logs of 'noetl-dagster services status --json'"))
        ]
    if filled is settings:
        return settings, []
    return filled, [("embedded services", ok(f"run in {filled.home}"))]


def _table(found: list[tuple[str, Finding]]) -> Table:
    table = Table("", "check", Column("found", overflow="fold"), box=None)
    for name, one in found:
        said = f"{one.what}; {one.remedy}" if one.remedy else one.what
        table.add_row(f"[{COLOURS[one.state]}]{one.state}[/]", escape(name), escape(said))
    return table


def _as_json(name: str, one: Finding) -> dict[str, object]:
    return {"check": name, "state": one.state.value, "what": one.what, "remedy": one.remedy or None}
