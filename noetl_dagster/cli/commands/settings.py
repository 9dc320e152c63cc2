"""``settings`` and ``doctor``: the settings of this process, and whether everything that they name works."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import typer
from pydantic import BaseModel, SecretStr
from rich.markup import escape
from rich.table import Column, Table

from noetl_dagster import embedded
from noetl_dagster.cli.console import Json, announce_start, console, print_json
from noetl_dagster.cli.doctor import CheckResult, CheckState, ok, wrong
from noetl_dagster.errors import ServiceError
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings, get_settings

COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red", "not set": "dim"}


async def doctor(as_json: Json = False) -> None:
    """Try every address, credential, folder and program of the settings.

    The exit code is 1 if something is wrong.
    """
    settings, results = get_settings(), []
    try:
        filled = embedded.ensure(settings, announce=announce_start)
        if filled is not settings:
            results.append(("embedded services", ok(f"run in {filled.home}")))
        settings = filled
    except ServiceError as error:
        remedy = "see the logs of 'noetl-dagster services status --json'"
        results.append(("embedded services", wrong(" ".join(str(error).split()), remedy)))
    results += await examine(settings)
    healthy = all(one.state is not CheckState.WRONG for _, one in results)
    if as_json:
        checks = [
            {"check": name, "state": one.state, "what": one.what, "remedy": one.remedy or None} for name, one in results
        ]
        print_json({"ok": healthy, "checks": checks})
    else:
        table = Table("", "check", Column("found", overflow="fold"), box=None)
        for name, one in results:
            text = f"{one.what}; {one.remedy}" if one.remedy else one.what
            table.add_row(f"[{COLOURS[one.state]}]{one.state}[/]", escape(name), escape(text))
        console.print(table)
    raise typer.Exit(0 if healthy else 1)


def settings() -> None:
    """Show the settings of this process; secrets are hidden."""
    current = get_settings()
    table = Table("variable", "value", Column("meaning", overflow="fold"), box=None)
    for name, field in Settings.model_fields.items():
        table.add_row(f"NOETL_{name.upper()}", shown(getattr(current, name)), field.description)
    console.print(table)


def shown(value: Any) -> str:
    """Returns the value of a setting without secrets; empty if it is not set."""
    if isinstance(value, SecretStr):
        return "*****" if value.get_secret_value() else ""
    if value is None or value in ({}, ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        value = value.model_dump_json(exclude_defaults=True).removeprefix("{}")
    return re.sub(r"(?<=://)[^/@\s]+@", "*****@", str(value))  # logins of addresses


async def examine(settings: Settings) -> list[tuple[str, CheckResult]]:
    """Runs all examinations and returns their findings in a fixed order. No text contains a secret."""
    # takes long to import, and ``settings`` does not need it
    from noetl_dagster.cli.doctor.checks import program_checks, server_checks, store_checks
    from noetl_dagster.cli.doctor.secrets import credential_checks, opened_credentials

    async with opened_credentials(settings) as credentials:
        checks = [
            *server_checks(settings),
            *store_checks(settings),
            *await credential_checks(settings, credentials),
            *program_checks(settings),
        ]
        findings = await asyncio.gather(*(check.find() for check in checks))
    redact = SECRETS.redact
    return [
        (check.name, replace(one, what=redact(one.what), remedy=redact(one.remedy)))
        for check, one in zip(checks, findings, strict=True)
    ]
