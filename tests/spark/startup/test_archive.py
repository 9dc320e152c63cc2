"""The class-data archive: used when it is whole, left aside when it is not, made once and never waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from noetl_dagster.settings import Settings
from noetl_dagster.spark import class_archive as archive_module
from noetl_dagster.spark.class_archive import PAUSE_AFTER_FAILURE, ClassArchive, archive_for, has_memory
from noetl_dagster.spark.sessions import begin_archiving, session_config
from tests.waiting import PROCESS_SECONDS

pytestmark = pytest.mark.spark

SESSION = textwrap.dedent(
    """
    import pathlib, sys
    from noetl_dagster.settings import Settings
    from noetl_dagster.spark.sessions import SparkSessions
    settings = Settings(home=pathlib.Path(sys.argv[1]), spark_master="local[1]", spark_driver_memory="512m")
    session = SparkSessions(settings).get()
    arguments = pathlib.Path(f"/proc/{session.sparkContext._gateway.proc.pid}/cmdline").read_text()
    print("rows", session.range(3).count(), "archive", "-XX:SharedArchiveFile" in arguments)
    """
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, spark_class_archive=True)


@pytest.fixture
def archive(settings: Settings) -> ClassArchive:
    found = archive_for(settings, session_config(settings))
    assert found is not None
    found.file.parent.mkdir(parents=True)
    return found


def made(folder: Path, size: int = 1000) -> Path:
    draft = folder / "draft"
    draft.write_bytes(b"x" * size)
    return draft


def start_session(home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SESSION, str(home)],
        capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False, cwd=home,
        env={**os.environ, "NOETL_SPARK_CLASS_ARCHIVE": "true"},
    )  # fmt: skip


def test_it_counts_only_as_it_was_made(archive: ClassArchive, tmp_path: Path) -> None:
    assert archive.is_wanted
    assert archive.java_options() == ""
    archive.publish(made(tmp_path))
    assert archive.is_made
    assert not archive.is_wanted
    assert f"-XX:SharedArchiveFile={archive.file}" in archive.java_options()
    assert "-Xshare:auto" in archive.java_options()
    os.truncate(archive.file, 500)  # a JVM would crash on it
    assert not archive.is_made
    assert archive.java_options() == ""


def test_a_failure_is_not_tried_again_at_once(archive: ClassArchive, tmp_path: Path) -> None:
    archive.publish(made(tmp_path))
    archive.discard("no room")
    assert not archive.is_made
    assert not archive.is_wanted
    assert archive.failure.read_text() == "no room\n"
    before = time.time() - PAUSE_AFTER_FAILURE - 1
    os.utime(archive.failure, (before, before))
    assert archive.is_wanted
    archive.publish(made(tmp_path))
    assert not archive.failure.exists()


def test_one_process_makes_it_and_removes_what_killed_ones_left(archive: ClassArchive) -> None:
    left = archive.file.parent / f"{archive.file.stem}.making-1"
    left.mkdir()
    (left / "classes.jsa").write_bytes(b"half")
    with archive.making() as first, archive.making() as second:
        assert (first, second) == (True, False)
        assert not left.exists()
    with archive.making() as again:
        assert again


def test_each_java_pyspark_and_class_path_has_its_own(
    settings: Settings, archive: ClassArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file_with(**changes: object) -> Path:
        own = settings.model_copy(update=changes)
        found = archive_for(own, session_config(own))
        assert found is not None
        return found.file

    assert file_with(spark_driver_memory="7g") == archive.file
    assert file_with(spark_config={"spark.jars": "/some.jar"}) != archive.file
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.touch()
    monkeypatch.setenv("JAVA_HOME", str(java.parents[1]))
    assert file_with() != archive.file


@pytest.mark.parametrize(
    "changes",
    [
        {"spark_class_archive": False},
        {"spark_remote": "sc://somewhere:15002"},
        {"spark_driver_java_options": "-XX:SharedArchiveFile=/my.jsa"},
        {"spark_driver_java_options": "-Xshare:off"},
        {"spark_config": {"spark.driver.extraJavaOptions": "-Dmine=1"}},
    ],
)
def test_nobody_gets_one_who_has_decided_otherwise(settings: Settings, changes: dict[str, object]) -> None:
    own = settings.model_copy(update=changes)
    assert archive_for(own, session_config(own)) is None


def test_without_java_there_is_none(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert archive_for(settings, session_config(settings)) is None


def test_it_is_not_made_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "MEMORY_TO_MAKE", 1000)
    monkeypatch.setattr(archive_module, "CONTAINER", tmp_path)
    assert has_memory(), "no limit"
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert has_memory()
    (tmp_path / "memory.max").write_text("5999\n")
    assert not has_memory()
    (tmp_path / "memory.max").write_text("6000\n")
    assert has_memory()


@pytest.mark.slow
def test_a_jvm_that_dies_of_its_archive_is_started_without(archive: ClassArchive, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsa"
    subprocess.run(["java", f"-XX:ArchiveClassesAtExit={whole}", "-version"], check=True, capture_output=True)
    half = tmp_path / "half.jsa"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    archive.publish(half)  # whose note knows no better
    done = start_session(tmp_path)
    assert "rows 3 archive False" in done.stdout, done.stderr
    assert not archive.file.exists()
    assert "Java did not start with it" in archive.failure.read_text()


@pytest.mark.slow
def test_it_is_made_in_the_background_and_used_in_silence(archive: ClassArchive, tmp_path: Path) -> None:
    first = start_session(tmp_path)
    assert "rows 3 archive False" in first.stdout, first.stderr
    deadline = time.monotonic() + 300
    while not archive.is_made and time.monotonic() < deadline:
        assert not archive.failure.exists(), archive.failure.read_text()
        time.sleep(0.5)
    second = start_session(tmp_path)
    assert "rows 3 archive True" in second.stdout, second.stderr
    assert not [line for line in second.stderr.splitlines() if "cds" in line.lower() or "archive" in line]
    assert [path.name for path in archive.file.parent.glob("*.making-*")] == []


@pytest.mark.slow
def test_making_that_is_killed_leaves_nothing_that_is_used(settings: Settings, archive: ClassArchive) -> None:
    process = begin_archiving(settings)
    deadline = time.monotonic() + 60
    while not list(archive.file.parent.glob("*.making-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert archive.is_wanted
    with archive.making() as mine:
        assert mine
        assert list(archive.file.parent.glob("*.making-*")) == []
