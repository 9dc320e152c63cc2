"""The demo where something that it needs is missing, and the playbook that it brings."""

from __future__ import annotations

from pathlib import Path

from noetl_dagster.cli.commands.demo import FLOW
from noetl_dagster.extras import shipped_folder

from .conftest import Cli


def test_without_java_it_names_the_remedy_before_it_starts_anything(
    cli: Cli, environment: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    without = {**environment, "JAVA_HOME": "", "PATH": str(tmp_path), "NOETL_HOME": str(home)}

    done = cli("demo", environment=without)

    assert done.returncode == 1
    assert "uses Spark, which needs Java: no java on the PATH" in done.stderr
    assert "install Java 17 or newer, or set JAVA_HOME" in done.stderr
    assert "noetl-dagster init" in done.stderr
    assert not (home / "services.json").exists()


def test_its_playbook_has_its_functions_beside_it() -> None:
    found = shipped_folder("playbooks") / FLOW

    assert found.with_name("patient_flow_spark.py").is_file()
    assert "patient_flow_spark.py:normalise" in found.read_text()
