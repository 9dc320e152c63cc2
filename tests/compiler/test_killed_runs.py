"""A Dagster run whose processes are killed in a fan-out: re-executed from failure, only unfinished shards run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest
from dagster import DagsterInstance, DagsterRunStatus

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.ledger import assert_only_unfinished_ran_again, lines, written_by
from tests.playbooks import text_of
from tests.processes import killed_in_the_end
from tests.waiting import ended, until_now

ITEMS = 48

PLAYBOOK = text_of(
    "ledger",
    """
    workload: {ledger: "", items: 48}
    workflow:
      - step: warm  # ends as soon as two processes work on it
        loop: {in: "{{ range(400) }}", iterator: n, spec: {mode: parallel, max_in_flight: 4}}
        tool:
          kind: python
          input: {ledger: "{{ ledger }}"}
          code: |
            import os, pathlib, time
            path = pathlib.Path(ledger + ".warm")
            with path.open("a") as file:
                file.write(f"{os.getpid()}\\n")
            if len(set(path.read_text().split())) < 2:
                time.sleep(0.2)
        next: [fan]
      - step: fan
        loop: {in: "{{ range(items) }}", iterator: n}
        spec: {loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 3}}
        tool: TOOL
        next: [total]
      - step: total
        tool: {kind: python, input: {items: "{{ fan.results }}"}, code: "result = sum(item['n'] for item in items)"}
    """,
)
SINK = {
    "tool": "postgres",
    "auth": "pg",
    "table": "taken",
    "mode": "upsert",
    "key": ["execution_id", "loop_id", "shard_id"],
}
# half of the items wait until a process is dead
TOOL = written_by("n % 24 >= 12", '{"n": n}', sink=SINK)

RUN = """
import sys, json
from dagster import DagsterInstance, ReexecutionOptions, execute_job
from dagster._core.definitions.reconstruct import ReconstructableRepository
config, failed = sys.argv[1:]
job = ReconstructableRepository.for_module("noetl_dagster.definitions", "defs").get_reconstructable_job("ledger")
with DagsterInstance.get() as instance:
    options = ReexecutionOptions.from_failure(failed, instance) if failed else None
    with execute_job(job, instance, run_config=json.loads(config), reexecution_options=options) as result:
        sys.exit(not result.success)
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(settings: Settings, dagster_instance: DagsterInstance, tmp_path: Path) -> Iterator[Start]:
    """Runs the playbook's job, or re-executes a run of it from failure, in a process of its own."""
    folder = tmp_path / "playbooks"
    folder.mkdir()
    settings = settings.model_copy(update={"default_postgres_credential": "embedded", "playbooks_path": folder})
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    home = {"DAGSTER_HOME": dagster_instance.root_directory}

    def start(failed: str = "") -> subprocess.Popen[bytes]:
        (folder / "ledger.yaml").write_text(PLAYBOOK.replace("TOOL", TOOL))
        config = {
            "ops": {"ledger_playbook": {"config": {"ledger": str(tmp_path / "ledger.txt"), "items": ITEMS}}},
            "execution": {"config": {"threaded": {"processes": 2}}},
        }
        return start_process(
            [sys.executable, "-c", RUN, json.dumps(config), failed],
            env={**inherited, **embedded.environment(settings), **home},
            stdout=(tmp_path / "log.txt").open("ab"),
        )

    with killed_in_the_end() as start_process:
        yield start


@pytest.fixture
def log(settings: Settings) -> Iterator[psycopg2.extensions.cursor]:
    """A cursor on the test's database, with the table that the sink writes to."""
    connection = psycopg2.connect(settings.db_url)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE taken (execution_id bigint, loop_id text, shard_id text, n int, "
            "PRIMARY KEY (execution_id, loop_id, shard_id))"
        )
        yield cursor
    connection.close()


def test_a_killed_driver_with_helpers(
    start: Start, log: psycopg2.extensions.cursor, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    driver = start()
    until_done(driver, log, tmp_path)
    helpers = {pid for _, pid in lines(tmp_path / "ledger.txt")} - {driver.pid}
    assert helpers, "a helper has some of the shards"
    driver.kill()
    driver.wait()
    until_now(lambda: all(map(ended, helpers)), "the end of the helpers, whose driver is dead")
    [run] = dagster_instance.get_runs()
    dagster_instance.report_run_failed(run)  # as Dagster's run monitoring does

    finish(start(run.run_id), log, dagster_instance, tmp_path)


def until_done(driver: subprocess.Popen[bytes], log: psycopg2.extensions.cursor, tmp_path: Path) -> None:
    """Waits until a run has done some shards: first for its start, then for that of the groups."""

    def runs(condition: Callable[[], bool]) -> bool:
        return driver.poll() is not None or condition()

    until_now(lambda: runs(lambda: started(log)), "the fan-out")
    until_now(lambda: runs((tmp_path / "ledger.txt").exists), "the first shard")
    until_now(lambda: runs(lambda: len(done(log)) >= 8), "shards")
    assert driver.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]


def finish(
    again: subprocess.Popen[bytes], log: psycopg2.extensions.cursor, instance: DagsterInstance, tmp_path: Path
) -> None:
    """Waits for the re-execution: nothing lost, nothing that was done is done again, the sink has each once."""
    finished = done(log)
    assert 8 <= len(finished) < ITEMS, "it was killed in the middle"
    (tmp_path / "go").touch()
    assert again.wait(180) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert_only_unfinished_ran_again(tmp_path / "ledger.txt", ITEMS, finished)
    log.execute("SELECT count(DISTINCT execution_id) FROM noetl.event")
    assert log.fetchone() == (1,), "the execution went on"
    once = {
        "command.issued": ITEMS + 1,
        "loop.shard.done": ITEMS,
        "loop.fanin.completed": 1,
        "playbook.completed": 1,
    }
    for kind, count in once.items():
        log.execute(
            "SELECT count(*) FROM noetl.event WHERE event_type = %s AND node_name IS DISTINCT FROM 'warm'",
            [kind],
        )
        assert log.fetchone() == (count,), kind
    log.execute("SELECT n FROM taken ORDER BY n")
    assert [n for (n,) in log.fetchall()] == list(range(ITEMS)), "the sink has each shard once"
    log.execute("SELECT result -> 'data' FROM noetl.event WHERE event_type = 'step.exit' AND node_name = 'total'")
    assert log.fetchone() == (sum(range(ITEMS)),)
    assert instance.get_runs()[0].status is DagsterRunStatus.SUCCESS


def started(log: psycopg2.extensions.cursor) -> bool:
    log.execute("SELECT 1 FROM noetl.event WHERE event_type = 'loop.fanout.started'")
    return log.fetchone() is not None


def done(log: psycopg2.extensions.cursor) -> set[int]:
    log.execute("SELECT current_index FROM noetl.event WHERE event_type = 'loop.shard.done'")
    return {index for (index,) in log.fetchall()}
