"""What other processes are given: variables, Dagster's folder, the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dagster import DagsterInstance
from pydantic import SecretStr
from typer.testing import CliRunner

from noetl_dagster import embedded
from noetl_dagster.cli.commands.services import app
from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import EventTransport, Settings, get_settings


def test_child_process_has_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Settings(
        home=tmp_path,
        db_url="postgresql://u:p@h/d",
        minio_secret_key=SecretStr("not the default"),
        event_transport=EventTransport.NATS,
        embedded=False,
        spark_config={"spark.executor.memory": "4g"},
    )
    for name, value in embedded.environment(ours).items():
        monkeypatch.setenv(name, value)
    assert Settings() == ours


def test_address_that_is_set_is_not_replaced(running: Settings, home: Path) -> None:
    own = Settings(home=home, dagster_db_url="postgresql://elsewhere/dagster", nats_url="nats://elsewhere")
    filled = embedded.ensure(own)
    assert filled.dagster_db_url == "postgresql://elsewhere/dagster"
    assert filled.nats_url == "nats://elsewhere"
    assert filled.db_url == running.db_url


def test_foreign_event_log_gets_no_local_volume(running: Settings, home: Path) -> None:
    own = Settings(home=home, db_url="postgresql://elsewhere/noetl")
    assert embedded.ensure(own).pvc_mount_path is None  # its other clients could not see the folder
    assert running.pvc_mount_path == home / "pvc"


def test_dagster_home_opens_an_instance_in_postgres(running: Settings) -> None:
    folder = embedded.dagster_home(running)
    with DagsterInstance.from_config(str(folder)) as instance:
        assert "postgres" in type(instance.run_storage).__module__
        assert instance.get_runs_count() == 0
        assert not instance.telemetry_enabled
        assert type(instance.run_launcher).__name__ == "WarmRunLauncher"


def test_dagster_home_follows_the_address(tmp_path: Path) -> None:
    for address in ("postgresql://one/dagster", "postgresql://two/dagster"):
        folder = embedded.dagster_home(Settings(home=tmp_path, dagster_db_url=address))
        psycopg2_url = address.replace("postgresql://", "postgresql+psycopg2://")
        assert psycopg2_url in (folder / "dagster.yaml").read_text()


def test_dagster_home_needs_an_address(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="set NOETL_DAGSTER_DB_URL"):
        embedded.dagster_home(Settings(home=tmp_path))


def test_commands(running: Settings, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOETL_HOME", str(home))
    get_settings.cache_clear()
    runner = CliRunner()

    assert "running" in runner.invoke(app, ["up"]).output
    found = json.loads(runner.invoke(app, ["status", "--json"]).output)
    assert {one["service"] for one in found if one["running"]} >= {"postgres", "nats", "object_store"}
    exported = runner.invoke(app, ["env"]).output.splitlines()
    assert f"export NOETL_DB_URL={running.db_url}" in exported
    assert f"export DAGSTER_HOME={home / 'dagster'}" in exported
    get_settings.cache_clear()
