"""What shells offer: commands, options and executions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings
from tests.forked import run

from .test_commands import GOOD

Offered = Callable[..., list[str]]


@pytest.fixture
def offered(environment: dict[str, str], tmp_path: Path) -> Offered:
    """Returns what bash, or another shell, offers for the last word."""

    def ask(*words: str, shell: str = "bash", **more: str) -> list[str]:
        line = " ".join(("noetl-dagster", *words))
        asked = {
            "_NOETL_DAGSTER_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words)),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        told = run("noetl-dagster", environment=environment | asked | more, folder=tmp_path, texts=tmp_path)
        assert (told.returncode, told.stderr) == (0, "")
        return list(filter(None, told.stdout.splitlines()))

    return ask


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["st"], ["status", "state"]),
        (["services", "u"], ["up"]),
        (["status", "--w"], ["--watch"]),
        (["run", "play"], []),  # nothing: the shell completes files
        (["check", "play"], []),
    ],
)
def test_commands_and_options(offered: Offered, words: list[str], wanted: list[str]) -> None:
    assert offered(*words) == wanted


async def test_executions(offered: Offered, settings: Settings) -> None:
    engine = await Engine.open(settings)
    first, second = [(await engine.lifecycle.create(parse_playbook(GOOD))).id for _ in range(2)]
    await engine.close()
    newest = [str(second), str(first)]
    assert offered("resume", "") == newest
    assert offered("cancel", str(second)[:6]) == newest
    assert offered("events", "--follow", str(first)) == [str(first)]
    assert any(str(first) in line and "sum RUNNING" in line for line in offered("status", "", shell="zsh"))
    assert f"{second}\tsum RUNNING" in offered("status", "", shell="fish")


def test_without_a_database_it_offers_none_and_starts_none(offered: Offered, tmp_path: Path) -> None:
    assert offered("status", "", NOETL_DB_URL="postgresql://nobody@127.0.0.1:1/none") == []
    home = tmp_path / "unused"
    assert offered("status", "", NOETL_DB_URL="", NOETL_EMBEDDED="true", NOETL_HOME=str(home)) == []
    assert not home.exists()


def test_bash_asks_the_program(environment: dict[str, str], tmp_path: Path) -> None:
    bash, program = shutil.which("bash"), Path(sys.executable).with_name("noetl-dagster")
    if bash is None or not program.exists():
        pytest.skip("needs bash and the installed program")
    script = f"""
        source "$HOME/.bashrc"
        PATH={program.parent}:$PATH
        COMP_WORDS=(noetl-dagster execu); COMP_CWORD=1
        $(complete -p noetl-dagster | sed 's/.*-F \\([^ ]*\\) .*/\\1/') noetl-dagster
        echo "${{COMPREPLY[@]}}"
    """
    alone = environment | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = run("noetl-dagster", "--install-completion", "bash", environment=alone, folder=tmp_path, texts=tmp_path)
    assert "bash completion installed" in done.stdout
    told = subprocess.run([bash, "-c", script], env=alone, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout == "executions\n"
