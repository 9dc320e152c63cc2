"""Partitions filled by Dagster's own commands and daemon: an execution each, found again by their partition."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from dagster import AssetKey, DagsterInstance, DagsterRunStatus

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.cli.conftest import Cli
from tests.forked import run
from tests.playbooks import text_of
from tests.waiting import PROCESS_SECONDS, until, until_now

DAYS = ["2026-01-01", "2026-01-02", "2026-01-03"]

DAILY = text_of(
    "daily",
    """
    dagster: {partitions: {kind: daily, start: "2026-01-01", end: "2026-01-08", workload: day}}
    workload: {day: null}
    workflow:
      - step: make
        checks: [{row_count: 2}]
        tool:
          kind: python
          input: {day: "{{ day }}"}
          code: |
            import pathlib
            if pathlib.Path("FOLDER", day).exists():
                raise ValueError(day + " is not there yet")
            result = [{"day": day, "n": n} for n in range(2)]
    """,
)
FOLLOWER = text_of(
    "follower",
    """
    dagster: {partitions: {kind: daily, start: "2026-01-01", end: "2026-01-08", workload: day}}
    workload: {day: null}
    workflow:
      - step: follow
        from: {rows: tests/daily/make}
        tool: {kind: python, input: {rows: "{{ rows }}"}, code: "result = rows[0]['day']"}
    """,
)
EXECUTIONS = """
SELECT execution_id, partition ->> 'key' AS day, ended FROM (
    SELECT execution_id, context -> 'partition' AS partition,
           (SELECT event_type FROM noetl.event AS terminal
            WHERE terminal.execution_id = initialized.execution_id
              AND event_type IN ('playbook.completed', 'playbook.failed') ORDER BY event_id DESC LIMIT 1) AS ended
    FROM noetl.event AS initialized WHERE event_type = 'playbook.initialized' AND node_name = $1) AS found
ORDER BY execution_id
"""
RESULT = """
SELECT result -> 'data' FROM noetl.event WHERE event_type = 'step.exit' AND node_name = $1 AND meta ->> 'partition' = $2
ORDER BY event_id DESC LIMIT 1
"""

Dagster = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "playbooks"
    folder.mkdir()
    (folder / "daily.yaml").write_text(DAILY.replace("FOLDER", str(tmp_path)))
    (folder / "follower.yaml").write_text(FOLLOWER)
    return folder


@pytest.fixture
def own_environment(settings: Settings, environment: dict[str, str], folder: Path) -> dict[str, str]:
    home = embedded.dagster_home(settings)
    return environment | {"NOETL_PLAYBOOKS_PATH": str(folder), "DAGSTER_HOME": str(home)}


@pytest.fixture
def dagster(own_environment: dict[str, str], tmp_path: Path) -> Dagster:
    """Runs one of Dagster's commands over the code location of the folder; gives what it prints."""

    def dagster(*arguments: str) -> str:
        given = (*arguments, "-m", "noetl_dagster.definitions")
        done = run(*given, environment=own_environment, folder=tmp_path, texts=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
        return done.stdout

    return dagster


@pytest.fixture
def instance(own_environment: dict[str, str]) -> Iterator[DagsterInstance]:
    with DagsterInstance.from_config(own_environment["DAGSTER_HOME"]) as instance:
        yield instance


@pytest.fixture
def daemon(own_environment: dict[str, str], tmp_path: Path) -> Iterator[None]:
    """Dagster's daemon over the code location, while the test runs."""
    said = tmp_path / "daemon.log"
    with said.open("w") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("dagster-daemon")), "run", "-m", "noetl_dagster.definitions"],
            env=own_environment,
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        yield
        process.terminate()
        process.wait(PROCESS_SECONDS)


def ends(instance: DagsterInstance, count: int) -> list[DagsterRunStatus]:
    """Waits until so many runs have ended; how, by partition."""

    def ended() -> list[DagsterRunStatus]:
        runs = sorted(instance.get_runs(), key=lambda run: (run.tags["dagster/partition"], run.run_id))
        return [run.status for run in runs] if len(runs) == count and all(run.is_finished for run in runs) else []

    return until_now(ended, f"{count} runs to end")


async def test_a_backfill_of_a_job(
    dagster: Dagster, instance: DagsterInstance, pool: asyncpg.Pool[Any], cli: Cli, tmp_path: Path
) -> None:
    """Two partitions at once, one of which fails at first and is run again alone."""
    days = DAYS[:2]
    (tmp_path / DAYS[1]).touch()
    backfill = ("dagster", "job", "backfill", "-j", "daily", "--noprompt", "--partitions")
    dagster(*backfill, ",".join(days))
    assert ends(instance, 2) == [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE]
    rows = await pool.fetch(EXECUTIONS, "daily")
    assert {row["day"]: row["ended"] for row in rows} == {DAYS[0]: "playbook.completed", DAYS[1]: "playbook.failed"}
    key = AssetKey(["tests", "daily", "make"])
    assert instance.get_materialized_partitions(key) == {DAYS[0]}

    (tmp_path / DAYS[1]).unlink()
    dagster(*backfill, DAYS[1])
    ends(instance, 3)
    again = await pool.fetch(EXECUTIONS, "daily")
    assert [row["day"] for row in again[2:]] == [DAYS[1]], "and no other"
    assert instance.get_materialized_partitions(key) == set(days)

    listed = json.loads(cli("executions", "--partition", DAYS[1], "--json").stdout)
    assert [(one["execution_id"], one["partition"], one["status"]) for one in listed] == [
        (str(again[2]["execution_id"]), DAYS[1], "COMPLETED"),
        (str(next(row["execution_id"] for row in rows if row["day"] == DAYS[1])), DAYS[1], "FAILED"),
    ]
    made = json.loads(cli("executions", "--partition", DAYS[1], "--asset", "tests/daily/make", "--json").stdout)
    assert [one["execution_id"] for one in made] == [str(again[2]["execution_id"])]
    assert len(json.loads(cli("executions", "--asset", "tests/daily/make", "--json").stdout)) == 2
    assert DAYS[1] in cli("executions").stdout


LAUNCH = """
mutation Launch($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
  }
}
"""


@pytest.mark.slow
async def test_a_backfill_of_assets_through_the_daemon(
    dagster: Dagster, daemon: None, instance: DagsterInstance, folder: Path, pool: asyncpg.Pool[Any]
) -> None:
    """The daemon fills what a playbook makes, and then what another reads of it, partition by partition."""
    params = {
        "assetSelection": [{"path": ["tests", "daily", "make"]}, {"path": ["tests", "follower", "follow"]}],
        "partitionNames": DAYS,
    }
    said = dagster("dagster-graphql", "-t", LAUNCH, "-v", json.dumps({"params": params}))
    [answer] = [line for line in said.splitlines() if line.startswith("{")]
    launched = json.loads(answer)["data"]["launchPartitionBackfill"]
    assert launched["__typename"] == "LaunchBackfillSuccess", launched

    def over() -> bool:
        backfill = instance.get_backfill(launched["backfillId"])
        assert backfill is not None
        assert backfill.error is None, "".join(backfill.error.stack) + str(backfill.error.cause)
        return backfill.status.value.startswith("COMPLETED")

    await until(over, "the backfill to be over")
    for name in ("daily", "follower"):
        rows = await pool.fetch(EXECUTIONS, name)
        assert sorted((row["day"], row["ended"]) for row in rows) == [(day, "playbook.completed") for day in DAYS]
    for day in DAYS:
        assert await pool.fetchval(RESULT, "follow", day) == day
