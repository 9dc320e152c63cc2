"""The overview of the commands: true to each command, and shown without importing what they work with."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from noetl_dagster.cli.app import COMMANDS, GROUPS, LazyCommand, app

HEAVY = {"dagster", "fastapi", "pyarrow", "pyspark", "nats", "asyncpg"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_overview_says_what_the_command_says(name: str) -> None:
    target, help = COMMANDS[name]
    command = LazyCommand(name, target, help).load()

    assert inspect.cleandoc(command.help).partition("\n\n")[0].replace("\n", " ") == help
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_the_overview_lists_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])

    assert shown.exit_code == 0
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    assert all(f" {name} " in shown.output for name in COMMANDS)


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"noetl-dagster {version('noetl_dagster')}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["check", "playbooks"], ["settings"]])
def test_only_what_is_called_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom noetl_dagster.cli import main\n"
        "try: main()\nfinally: print('imported:', *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)

    assert HEAVY.isdisjoint(done.stderr.partition("imported:")[2].split())
