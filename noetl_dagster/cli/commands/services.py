"""``services``: the embedded services by hand."""

from __future__ import annotations

import asyncio
import shlex

import typer
from rich.table import Column, Table

from noetl_dagster import embedded
from noetl_dagster.cli.console import Json, announce_start, console, print_json, warn_of_stores
from noetl_dagster.launcher.address import stop
from noetl_dagster.settings import get_settings

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def up() -> None:
    """Start the services that have no address in the settings, and print the addresses.

    The bucket of results is created if it is missing.
    """
    asyncio.run(warn_of_stores(embedded.ensure(get_settings(), announce=announce_start)))
    _print(embedded.status(get_settings()))


@app.command()
def down() -> None:
    """Stop all services of the state folder; their data and ports are kept."""
    settings = get_settings()
    stop(embedded.run_server_folder(settings))
    embedded.down(settings)


@app.command()
def status(as_json: Json = False) -> None:
    """Show which services run, and their addresses."""
    services = embedded.status(get_settings())
    if as_json:
        print_json(
            [
                {"service": one.name, "running": one.running, "url": one.url, "pid": one.pid, "log": one.log}
                for one in services
            ]
        )
    else:
        _print(services)


@app.command()
def env() -> None:
    """Start the services and print settings with their addresses, for ``eval "$(...)"``.

    The settings include the records API and the credentials of the example playbooks.
    """
    settings = embedded.ensure(get_settings(), announce=announce_start)
    variables = {
        **embedded.environment(settings),
        **embedded.demo_environment(settings),
        "DAGSTER_HOME": str(embedded.dagster_home(settings)),
    }
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _print(services: list[embedded.ServiceStatus]) -> None:
    table = Table("service", "state", Column("address", overflow="fold"), "pid", box=None)
    for one in services:
        state = "[green]running[/]" if one.running else "stopped"
        table.add_row(one.name, state, one.url, str(one.pid or ""))
    console.print(table)
