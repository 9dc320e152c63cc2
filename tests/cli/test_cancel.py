"""``cancel``, and the termination of a Dagster run, stop an execution: its commands too, and once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from dagster import DagsterInstance, DagsterRunStatus

from tests.cli.conftest import COMMAND, Cli
from tests.playbooks import text_of
from tests.processes import StartProcess, killed_in_the_end
from tests.waiting import PROCESS_SECONDS, ended, until

PLAYBOOK = text_of(
    "slow",
    """
    workload: {folder: "FOLDER"}
    workflow:
      - step: start
        loop: {in: "{{ range(20) | list }}", iterator: n, spec: {mode: parallel, max_in_flight: 2}}
        tool: {kind: shell, command: "echo $$ > {{ folder }}/{{ n }}.pid; exec sleep 600"}
        next: [after]
      - {step: after, tool: {kind: noop}}
    """,
)
EVENTS = "SELECT event_type, count(*) FROM noetl.event GROUP BY 1"
CLAIMED = "SELECT count(*) = 2 FROM noetl.event WHERE event_type = 'command.claimed'"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The playbook in a folder of its own; its commands write their process ids into ``tmp_path``."""
    folder = tmp_path / "playbooks"
    folder.mkdir()
    path = folder / "slow.yaml"
    path.write_text(PLAYBOOK.replace("FOLDER", str(tmp_path)))
    return path


@pytest.fixture
def start() -> Iterator[StartProcess]:
    with killed_in_the_end() as start:
        yield start


async def commands_of(folder: Path, pool: asyncpg.Pool) -> list[int]:
    """Process ids of the two commands that may run at once, when their claims are in the log.

    A claim that is still on its way when the execution is cancelled is never appended.
    """

    def found() -> list[int]:
        texts = [path.read_text().strip() for path in folder.glob("*.pid")]
        return [int(text) for text in texts if text] if len(texts) == 2 and all(texts) else []

    commands = await until(found, "two commands that run")
    await until(lambda: pool.fetchval(CLAIMED), "the claims of the two commands")
    return commands


async def stopped_once(pool: asyncpg.Pool, commands: list[int]) -> None:
    """Checks what the processes and the log say after a cancellation."""
    await until(lambda: all(ended(pid) for pid in commands), "the end of the commands")
    events = Counter(dict(await pool.fetch(EVENTS)))
    assert events["execution.cancelled"] == 1
    assert events["command.claimed"] == 2
    assert not events["playbook.failed"] + events["playbook.completed"] + events["loop.done"]


async def test_cancel(
    cli: Cli, start: StartProcess, environment: dict[str, str], pool: asyncpg.Pool, file: Path, tmp_path: Path
) -> None:
    run = start([*COMMAND, "run", str(file)], env=environment, stdout=subprocess.PIPE, text=True)
    commands = await commands_of(tmp_path, pool)
    execution_id = str(await pool.fetchval("SELECT min(execution_id) FROM noetl.event"))
    cancelled = await asyncio.to_thread(cli, "cancel", execution_id, "--reason", "enough")
    assert cancelled.stdout == f"execution {execution_id} is cancelled\n", cancelled.stderr
    said = (await asyncio.to_thread(run.communicate, timeout=PROCESS_SECONDS))[0]
    assert run.returncode not in (0, None)
    assert "CANCELLED" in said, said
    await stopped_once(pool, commands)
    again = await asyncio.to_thread(cli, "cancel", execution_id)
    assert again.stdout == f"execution {execution_id} had ended already\n", again.stderr
    unknown = await asyncio.to_thread(cli, "cancel", "12345")
    assert unknown.returncode != 0
    assert "no execution 12345" in unknown.stderr


@pytest.mark.parametrize("executor", ["threaded", pytest.param("multiprocess", marks=pytest.mark.slow)])
async def test_terminating_the_dagster_run(
    executor: str,
    start: StartProcess,
    environment: dict[str, str],
    pool: asyncpg.Pool,
    dagster_instance: DagsterInstance,
    file: Path,
    tmp_path: Path,
) -> None:
    """As a launcher does it: the run is marked as being cancelled, its process gets an interrupt."""
    config = tmp_path / "config.yaml"
    config.write_text(f"execution: {{config: {{{executor}: {{}}}}}}")
    job = ["-m", "noetl_dagster.definitions", "-j", "slow", "-c", str(config)]
    own = {
        **environment,
        "NOETL_PLAYBOOKS_PATH": str(file.parent),
        "DAGSTER_HOME": dagster_instance.root_directory,
    }
    process = start(
        [sys.executable, "-m", "dagster", "job", "execute", *job], env=own, stdout=subprocess.PIPE, text=True
    )
    commands = await commands_of(tmp_path, pool)
    [run] = dagster_instance.get_runs()
    dagster_instance.report_run_canceling(run)
    process.send_signal(signal.SIGINT)
    await asyncio.to_thread(process.communicate, timeout=PROCESS_SECONDS)
    await stopped_once(pool, commands)
    ended_run = dagster_instance.get_run_by_id(run.run_id)
    assert ended_run is not None
    assert ended_run.status is DagsterRunStatus.CANCELED
    error = "SELECT error FROM noetl.event WHERE event_type = 'execution.cancelled'"
    assert run.run_id in await pool.fetchval(error)
