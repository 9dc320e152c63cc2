"""``settings``: the settings of this process, or all of them as a page of the documentation."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import SecretStr
from rich.table import Column, Table

from noetl_dagster.cli.console import console
from noetl_dagster.settings import Settings, get_settings

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
