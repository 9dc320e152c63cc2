"""What runs print is in a bucket, where every machine reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import psutil
import pytest
from dagster import DagsterInstance, job, op

from noetl_dagster import embedded
from noetl_dagster.launcher import compute_logs
from noetl_dagster.launcher.compute_logs import RunLogs
from noetl_dagster.launcher.stored_logs import StoredRunLogs
from noetl_dagster.settings import Settings, get_settings
from tests.embedded.peers import s3_client
from tests.waiting import until_now

KEY = ["a-run", "compute_logs", "a-file"]


@pytest.fixture(autouse=True)
def bucket(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket of the test, and the settings of a process with ``dagster.yaml``, which has no AWS environment."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(compute_logs, "mirrored", False)
    for name, value in embedded.environment(settings).items():
        monkeypatch.setenv(name, value)
    get_settings.cache_clear()
    s3_client(settings).create_bucket(Bucket=settings.minio_bucket)
    yield
    get_settings.cache_clear()


def manager(settings: Settings, folder: Path, **more: object) -> StoredRunLogs:
    config = {"bucket": settings.minio_bucket, "endpoint_url": settings.minio_endpoint, "local_dir": str(folder)}
    made = StoredRunLogs.from_config_value(None, {**config, **more})
    assert isinstance(made, StoredRunLogs)
    return made


def test_another_machine_reads_what_was_printed(settings: Settings, tmp_path: Path) -> None:
    session, processes = boto3.DEFAULT_SESSION, set(psutil.Process().children())
    here, there = manager(settings, tmp_path / "here"), manager(settings, tmp_path / "there")
    assert boto3.DEFAULT_SESSION is session, "playbook code does not get the keys"
    with here.capture_logs(KEY):
        print("said by a step", flush=True)
        print("and to the other side", file=sys.stderr, flush=True)
        assert set(psutil.Process().children()) == processes, "none copies it"
    here.dispose()
    assert there.is_capture_complete(KEY)
    printed = there.get_log_data(KEY)
    assert (printed.stdout, printed.stderr) == (b"said by a step\n", b"and to the other side\n")
    there.delete_logs(log_key=KEY)
    assert "Contents" not in s3_client(settings).list_objects_v2(Bucket=settings.minio_bucket)
    there.dispose()


def test_what_a_long_run_has_printed_so_far_is_seen_elsewhere(settings: Settings, tmp_path: Path) -> None:
    here, there = manager(settings, tmp_path / "here", upload_interval=1), manager(settings, tmp_path / "there")
    with here.capture_logs(KEY):
        print("so far", flush=True)
        until_now(lambda: there.get_log_data(KEY).stdout == b"so far\n", "what there is")
        assert not there.is_capture_complete(KEY)
    here.dispose()
    there.dispose()


def test_a_store_that_is_away_fails_no_run(settings: Settings, tmp_path: Path) -> None:
    @op
    def step() -> None:
        print("said by a step")

    @job
    def sample() -> None:
        step()

    config = {"bucket": "any", "endpoint_url": "http://127.0.0.1:9", "local_dir": str(tmp_path / "logs")}
    logs = {"module": "noetl_dagster.launcher.stored_logs", "class": "StoredRunLogs", "config": config}
    with DagsterInstance.local_temp(str(tmp_path), overrides={"compute_logs": logs}) as instance:
        result = sample.execute_in_process(instance=instance)
        assert result.success
        messages = [event.message or "" for event in result.all_events]
        assert any("127.0.0.1:9" in str(event) for event in result.all_events), messages
    [printed] = (tmp_path / "logs").rglob("*.out")
    assert printed.read_text() == "said by a step\n", "it stays on its machine"


def test_an_instance_has_the_store_where_it_is_not_on_this_machine(settings: Settings) -> None:
    for address, kind in (
        ("http://minio.example:9000", StoredRunLogs),
        (settings.minio_endpoint, RunLogs),
        (None, RunLogs),
    ):
        home = embedded.dagster_home(settings.model_copy(update={"minio_endpoint": address}))
        assert settings.minio_secret_key.get_secret_value() not in (home / "dagster.yaml").read_text()
        with DagsterInstance.from_config(str(home)) as instance:
            assert type(instance.compute_log_manager) is kind
