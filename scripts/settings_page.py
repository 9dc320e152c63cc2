"""The settings as a page of the documentation, from their class."""

from __future__ import annotations

from page_text import cell, code, page, table

from noetl_dagster.cli.commands.settings import shown
from noetl_dagster.settings import Settings

HEAD = """# Settings

All settings, with their defaults. Each one is an environment variable. The embedded services supply the addresses that
you leave empty. `noetl-dagster settings` shows the values of a process, and `noetl-dagster doctor` tries them.
"""


def settings_page() -> str:
    """``docs/reference/settings.md``."""
    rows = (
        (
            code(f"NOETL_{name.upper()}"),
            code(shown(field.get_default(call_default_factory=True))),
            cell(field.description),
        )
        for name, field in Settings.model_fields.items()
    )
    return page(HEAD, table(("variable", "default", "meaning"), rows))
