"""``settings`` and ``doctor``: the settings of this process, and whether everything that they name works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import SecretStr
from rich.markup import escape
from rich.table import Column, Table

from noetl_dagster import embedded
from noetl_dagster.cli.console import console, print_json
from noetl_dagster.cli.doctor.finding import Check, Finding, FindingState, ok, wrong
from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings, get_settings

if TYPE_CHECKING:
    from noetl_dagster.tools.access.credentials import Credentials

Json = Annotated[bool, typer.Option("--json", help="for programs")]

COLOURS = {
    FindingState.OK: "green",
    FindingState.WARNING: "yellow",
    FindingState.WRONG: "red",
    FindingState.NOT_SET: "dim",
}


def doctor(as_json: Json = False) -> None:
    """Try every address, credential, folder and program of the settings; exit code 1 when something is wrong."""
    settings, services = _with_services(get_settings())
    found = [*services, *asyncio.run(examine(settings))]
    healthy = all(one.state is not FindingState.WRONG for _, one in found)
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


HEAD = """# Settings

Every setting is an environment variable. What is left empty is filled by the embedded services.

| variable | default | meaning |
|---|---|---|
"""


def settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="the page docs/settings.md")] = False,
) -> None:
    """Show the settings of this process; secrets are hidden."""
    if markdown:
        typer.echo(settings_page(), nl=False)
        return
    table = Table("variable", "value", Column("meaning", overflow="fold"), box=None)
    current = get_settings()
    for name, field in Settings.model_fields.items():
        table.add_row(variable(name), _shown(getattr(current, name)), field.description or "")
    console.print(table)


def settings_page() -> str:
    """``docs/settings.md``, from the settings class."""
    rows = [
        f"| `{variable(name)}` | {_default(field.get_default(call_default_factory=True))} "
        f"| {(field.description or '').replace('|', '/')} |"
        for name, field in Settings.model_fields.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


def variable(name: str) -> str:
    """Returns the environment variable of a setting."""
    return f"NOETL_{name.upper()}"


def _default(value: Any) -> str:
    shown = _shown(value)
    return f"`{shown}`" if shown else ""


def _shown(value: Any) -> str:
    if value is None or value == {}:
        return ""
    if isinstance(value, SecretStr):
        return "*****"
    return str(value)


async def examine(settings: Settings) -> list[tuple[str, Finding]]:
    """Runs all examinations and returns their findings in a fixed order. No text contains a secret."""
    # much to import, which ``settings`` does not need
    from noetl_dagster.cli.doctor.local import program_checks, store_checks
    from noetl_dagster.cli.doctor.secrets import (
        credential_checks,
        hide_secrets,
        opened_credentials,
        provider_checks,
    )
    from noetl_dagster.cli.doctor.servers import database_checks, server_checks

    async with opened_credentials(settings) as credentials:
        hide_secrets(credentials, settings)
        checks = [
            *database_checks(settings),
            *server_checks(settings),
            *store_checks(settings),
            *await credential_checks(settings, credentials),
            *provider_checks(settings),
            *program_checks(settings),
        ]
        return await _found(checks, credentials)


async def _found(checks: Sequence[Check], credentials: Credentials) -> list[tuple[str, Finding]]:
    findings = await asyncio.gather(*(check.find() for check in checks))
    return [
        (check.name, replace(one, what=credentials.redact(one.what), remedy=credentials.redact(one.remedy)))
        for check, one in zip(checks, findings, strict=True)
    ]
