"""``noetl-dagster services``: the embedded services by hand."""

from __future__ import annotations

import asyncio
import json
import shlex
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from noetl_dagster import embedded
from noetl_dagster.cli.stores import look_at_stores
from noetl_dagster.errors import ServiceError
from noetl_dagster.launcher.address import stop
from noetl_dagster.settings import get_settings

app = typer.Typer(no_args_is_help=True, help="The embedded PostgreSQL, NATS and object store.")


@app.command()
def up() -> None:
    """Start the services whose addresses are not set, with the bucket of results, and print where they are."""
    try:
        settings = embedded.ensure(get_settings())
    except ServiceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    asyncio.run(look_at_stores(settings))
    _print(embedded.status(get_settings()))


@app.command()
def down() -> None:
    """Stop all services of the state folder; their data and ports stay."""
    settings = get_settings()
    stop(embedded.run_server_folder(settings))
    embedded.down(settings)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Tell which services run, and where."""
    found = embedded.status(get_settings())
    if as_json:
        typer.echo(json.dumps([_as_json(one) for one in found], indent=2))
    else:
        _print(found)


@app.command()
def env() -> None:
    """Start the services and print the settings that lead to them, for ``eval "$(...)"``.

    The records API and the credentials of the example playbooks are among them.
    """
    try:
        settings = embedded.ensure(get_settings())
        variables = {
            **embedded.environment(settings),
            **embedded.demo_environment(settings),
            "DAGSTER_HOME": str(embedded.dagster_home(settings)),
        }
    except ServiceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _print(found: list[embedded.ServiceStatus]) -> None:
    table = Table("service", "state", Column("address", overflow="fold"), "pid", box=None)
    for one in found:
        state = "[green]running[/]" if one.running else "stopped"
        table.add_row(one.name, state, one.url, str(one.pid or ""))
    Console().print(table)


def _as_json(one: embedded.ServiceStatus) -> dict[str, object]:
    return {
        "service": one.name.value,
        "running": one.running,
        "url": one.url,
        "pid": one.pid,
        "log": str(one.log),
    }
