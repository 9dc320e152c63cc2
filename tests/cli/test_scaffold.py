"""``init`` and ``new``: what they write works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from noetl_dagster.code_location import scaffold
from noetl_dagster.settings import Settings
from tests.cli.conftest import Cli
from tests.conftest import HOME, PROJECT
from tests.forked import run


@pytest.mark.long
def test_a_new_project_passes_its_own_test(cli: Cli, tmp_path: Path, settings: Settings) -> None:
    done = cli("init", "clinic-flow")
    assert done.returncode == 0, done.stderr
    project = tmp_path / "clinic-flow"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    environment |= {"PYTHONPATH": str(PROJECT), "NOETL_TEST_HOME": str(HOME)}

    def output_of(*arguments: str) -> str:
        process = run(*arguments, environment=environment, folder=project, texts=tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    pytest_itself = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    assert "1 passed" in output_of("-c", pytest_itself, "-p", "no:cacheprovider", "-o", "addopts=")
    output_of("dagster", "definitions", "validate", "-w", "workspace.yaml")


def test_what_is_there_stays(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "flow").mkdir()
    (tmp_path / "flow" / "README.md").write_text("mine")
    done = cli("init", "flow")
    assert done.returncode == 1
    assert "README.md is there already" in done.stderr
    assert [path.name for path in (tmp_path / "flow").iterdir()] == ["README.md"]


def test_an_example_is_copied(cli: Cli, tmp_path: Path) -> None:
    done = cli("init", "mine", "--example", "hello_squares")
    assert done.returncode == 0, done.stderr
    copied = {path.name for path in (tmp_path / "mine").iterdir()}
    assert copied == {".gitignore", "README.md", "squares.yaml"}
    assert cli("check", "mine").returncode == 0
    assert cli("init", "queue", "--example", "queue_cursor").returncode == 0
    readme = (tmp_path / "queue" / "README.md").read_text()
    assert "See cursor loops." in readme
    assert "](../" not in readme
    unknown = cli("init", "other", "--example", "squares")
    assert unknown.returncode == 1
    for path in (PROJECT / "examples").glob("*/README.md"):
        assert path.parent.name in unknown.stderr
    assert not (tmp_path / "other").exists()


def test_an_example_may_have_any_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "examples" / "shop"
    source.mkdir(parents=True)
    (source / "README.md").write_text("# Shop\n")
    (source / "shop.duckdb").write_bytes(b"\xff\xfe\x80\r\n")
    monkeypatch.setattr(scaffold, "shipped_folder", lambda name: source.parent)
    scaffold.copy_example(tmp_path / "mine", "shop")
    assert (tmp_path / "mine" / "shop.duckdb").read_bytes() == b"\xff\xfe\x80\r\n"


def test_a_playbook(cli: Cli) -> None:
    assert cli("new", "cubes").returncode == 0
    assert cli("check", "playbooks").returncode == 0
    assert "already exists" in cli("new", "cubes").stderr
    assert "is not a valid name for a playbook" in cli("new", "../cubes").stderr
