"""A run that dies is found and resumed by the sensor; what was done is not done again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
from dagster import (
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RunRequest,
    SensorResult,
    build_sensor_context,
)

from noetl_dagster.code_location.definitions import control_of
from noetl_dagster.code_location.launch import launch
from noetl_dagster.compiler.job import PlaybookJob, compile_playbook
from noetl_dagster.compiler.runs import execution_tags, latest_run
from noetl_dagster.engine.recovery.abandoned import REQUESTS, Abandoned, ResumeRequest, Verdict
from noetl_dagster.errors import PlaybookError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.sensors.recovery import build_recovery_sensor
from noetl_dagster.settings import Settings, dump_settings, load_settings
from tests import forked
from tests.definitions import definitions_of
from tests.playbooks import text_of
from tests.waiting import until_now, until_projected

ITEMS = 40
TEXT = text_of(
    "sample",
    """
    workflow:
      - step: start
        loop: {in: "{{ range(ITEMS) | list }}", iterator: n, spec: {mode: parallel, max_in_flight: 4}}
        tool:
          - kind: postgres
            auth: {type: postgres, url: "URL"}
            command: "INSERT INTO ran VALUES ({{ n }})"
          - {kind: shell, command: "test {{ n }} -lt 30 || until [ -e GO ]; do sleep 0.02; done"}
        next: [after]
      - step: after
        tool: {kind: python, input: {done: "{{ start.done }}"}, code: "result = done"}
    """,
)


def drive(file: str, settings: str, folder: str, execution_id: int) -> None:
    """Launches an execution in a session of its own."""
    os.setsid()
    with DagsterInstance.from_ref(DagsterInstance.local_temp(folder).get_ref()) as instance:
        noetl = EngineProvider(load_settings(settings))
        launch(load_playbook(Path(file)), noetl, instance, execution_id=execution_id)


@pytest.fixture
def noetl(settings: Settings) -> Iterator[EngineProvider]:
    eager = settings.model_copy(
        update={"recovery_backoff_seconds": 0.3, "recovery_attempts": 2, "loop_collection_threshold": 10}
    )
    yield EngineProvider(eager)
    close_engines()


@pytest.fixture
def job(settings: Settings, noetl: EngineProvider, tmp_path: Path) -> PlaybookJob:
    assert settings.db_url is not None
    run_sync(noetl.engine().runtime.pool.execute("CREATE TABLE ran (n int)"))
    file = tmp_path / "sample.yaml"
    file.write_text(
        TEXT.replace("URL", settings.db_url).replace("ITEMS", str(ITEMS)).replace("GO", str(tmp_path / "go"))
    )
    return compile_playbook(load_playbook(file))


def killed_at_half(job: PlaybookJob, noetl: EngineProvider, settings: Settings, tmp_path: Path) -> int:
    """Starts a run in a process of its own and kills it when half of the loop is done."""
    execution_id = noetl.engine().runtime.ids.next()
    arguments = (job.playbook.file, dump_settings(noetl.settings), str(tmp_path / "dagster"), execution_id)
    process = forked.process(os.environ, drive, *arguments)
    process.start()
    pool = noetl.engine().runtime.pool
    query = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.completed'"
    until_now(lambda: run_sync(pool.fetchval(query, execution_id)) >= ITEMS // 2)
    assert process.pid is not None
    assert process.is_alive(), "it cannot end before it is told to go on"
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    (tmp_path / "go").touch()
    return execution_id


async def wipe_nats(settings: Settings) -> None:
    """Deletes every stream and bucket of the test: NATS is a cache."""
    assert settings.nats_url is not None
    client = await nats.connect(settings.nats_url)
    manager = client.jsm()
    for stream in await manager.streams_info():
        name = stream.config.name or ""
        if settings.nats_namespace.replace("-", "_").lower() in name.replace("-", "_").lower():
            await manager.delete_stream(name)
    await client.close()


def tick(job: PlaybookJob, noetl: EngineProvider, instance: DagsterInstance, cursor: str | None = None) -> SensorResult:
    sensor = build_recovery_sensor([job], noetl)
    repository = definitions_of([job.playbook], noetl).get_repository_def()
    context = build_sensor_context(instance=instance, cursor=cursor, repository_def=repository)
    result: Any = sensor(context)
    return result


def execute(job: PlaybookJob, noetl: EngineProvider, instance: DagsterInstance, request: RunRequest) -> Any:
    definition = definitions_of([job.playbook], noetl).resolve_job_def("sample")
    return definition.execute_in_process(instance=instance, tags=request.tags, raise_on_error=False)


def test_a_loop_killed_at_half_goes_on_without_doing_anything_again(
    job: PlaybookJob, noetl: EngineProvider, settings: Settings, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    execution_id = killed_at_half(job, noetl, settings, tmp_path)
    pool = noetl.engine().runtime.pool
    rows = run_sync(
        pool.fetch(
            "SELECT current_index FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.completed'",
            execution_id,
        )
    )
    finished = {row["current_index"] for row in rows}
    assert len(finished) < ITEMS
    started = "SELECT context FROM noetl.event WHERE execution_id = $1 AND event_type = 'loop.started'"
    assert "://" in run_sync(pool.fetchval(started, execution_id))["collection_ref"]
    asyncio.run(wipe_nats(settings))
    [request] = until_now(lambda: tick(job, noetl, dagster_instance).run_requests)
    dead = latest_run(dagster_instance, execution_id, "sample")
    assert dead is not None
    assert dead.status is DagsterRunStatus.FAILURE, "a run without a process is reported as failed"

    begun = {row["n"] for row in run_sync(pool.fetch("SELECT n FROM ran"))}
    result = execute(job, noetl, dagster_instance, request)
    assert result.success
    state = run_sync(noetl.engine().runtime.load(execution_id)).state
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert (state.epoch, state.latest["after"].envelope["data"]) == (2, ITEMS)
    ran = Counter(row["n"] for row in run_sync(pool.fetch("SELECT n FROM ran")))
    assert set(ran) == set(range(ITEMS))
    assert all(ran[index] == 1 for index in finished), "a finished iteration ran again"
    assert ran.total() == ITEMS + len(begun - finished), "those whose end was not in the log yet ran twice, no others"
    assert tick(job, noetl, dagster_instance).run_requests == []

    late = execute(job, noetl, dagster_instance, request)
    assert not late.success, "a second run of the same request finds its epoch open"


def test_recovery_backs_off_and_gives_up(job: PlaybookJob, noetl: EngineProvider) -> None:
    engine = noetl.engine()
    created = run_sync(engine.lifecycle.create(job.playbook))
    last = "SELECT max(created_at) FROM noetl.event WHERE execution_id = $1"
    start = run_sync(engine.runtime.pool.fetchval(last, created.id))
    run_sync(until_projected(engine.runtime.pool, created.id))

    def judged(seconds: float, *requests: float) -> Abandoned:
        requested = {created.id: ResumeRequest(2, len(requests), start.timestamp() + requests[-1])} if requests else {}
        moment = start + timedelta(seconds=seconds)
        [found] = run_sync(
            engine.recovery().abandoned(REQUESTS.validate_json(REQUESTS.dump_json(requested)), now=moment)
        )
        return found

    assert judged(0.2).verdict is Verdict.WAIT, "its driver may be between two processes"
    assert judged(0.4).verdict is Verdict.RESUME
    assert judged(0.9, 0.4).verdict is Verdict.WAIT, "the pause doubles"
    assert judged(1.1, 0.4).verdict is Verdict.RESUME
    last_look = judged(3.0, 0.4, 1.1)
    assert (last_look.verdict, last_look.attempts) == (Verdict.GIVE_UP, 2)
    run_sync(engine.recovery().give_up(last_look))
    state = run_sync(engine.runtime.load(created.id)).state
    assert state.status is ExecutionStatus.FAILED
    assert "without a word" in str(state.error)
    assert run_sync(engine.recovery().abandoned(now=start + timedelta(hours=1))) == []


def test_an_execution_that_cannot_be_read_holds_no_other_up(job: PlaybookJob, noetl: EngineProvider) -> None:
    engine = noetl.engine()
    broken = run_sync(engine.lifecycle.create(job.playbook.model_copy(update={"source": "no: playbook"})))
    forget = "UPDATE noetl.catalog SET model = NULL WHERE catalog_id = $1"
    run_sync(engine.runtime.pool.execute(forget, broken.state.catalog_id))
    engine.runtime._programs.clear()
    with pytest.raises(PlaybookError):
        run_sync(engine.runtime.load(broken.id))
    run_sync(until_projected(engine.runtime.pool, broken.id))
    whole = run_sync(engine.lifecycle.create(job.playbook))
    run_sync(until_projected(engine.runtime.pool, whole.id))
    later = datetime.now(UTC) + timedelta(hours=1)
    found = run_sync(engine.recovery().abandoned(now=later))
    assert [one.execution_id for one in found] == [whole.id]


def test_each_request_has_a_key_of_its_own(
    job: PlaybookJob, noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    """A requested run may die before it opens its epoch: the next request must not be taken for the first."""
    created = run_sync(noetl.engine().lifecycle.create(job.playbook))
    keys: list[str | None] = []
    cursor = None

    def both_are_requested() -> bool:
        nonlocal cursor
        result = tick(job, noetl, dagster_instance, cursor)
        cursor = result.cursor
        keys.extend(request.run_key for request in result.run_requests or [])
        return len(keys) >= 2

    until_now(both_are_requested, "two requests")
    assert keys == [f"noetl-recovery/{created.id}/2/{attempt}" for attempt in (0, 1)]


def test_an_execution_with_a_living_process_is_left_alone(
    job: PlaybookJob, noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    engine = noetl.engine()
    created = run_sync(engine.lifecycle.create(job.playbook))
    run_sync(engine.liveness.hold(created.id))
    time.sleep(0.35)
    assert tick(job, noetl, dagster_instance).run_requests == []


def test_a_run_of_several_playbooks_that_was_terminated_is_not_resumed(
    job: PlaybookJob, noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    """Such a run has an execution of each playbook; those that waited for their turn are cancelled too."""
    engine = noetl.engine()
    created = run_sync(engine.lifecycle.create(job.playbook))
    other = engine.runtime.ids.next()  # which the run began later, so that the plain tags are its own
    run_id = str(uuid.uuid4())
    tags = execution_tags(created.id, run_id, ".sample") | execution_tags(other, run_id, ".other")
    run = DagsterRun(job_name="__ASSET_JOB", run_id=run_id, tags=tags, status=DagsterRunStatus.CANCELED)
    dagster_instance.add_run(run)

    def is_cancelled() -> bool:
        assert tick(job, noetl, dagster_instance).run_requests == []
        return run_sync(engine.runtime.load(created.id)).state.status is ExecutionStatus.CANCELLED

    until_now(is_cancelled, "cancellation")


def test_recovery_is_on_by_default(job: PlaybookJob, noetl: EngineProvider) -> None:
    definitions = control_of([job], noetl)
    named = {sensor.name: sensor.default_status.value for sensor in definitions.sensors or []}
    assert named.items() >= {"noetl_recovery": "RUNNING", "noetl_projection": "RUNNING"}.items()
    schedules: Any = definitions.schedules or []
    assert {one.name: one.default_status.value for one in schedules} == {
        "noetl_reaper": "RUNNING",
        "noetl_maintenance": "RUNNING",
    }
