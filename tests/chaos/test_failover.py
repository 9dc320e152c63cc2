"""PostgreSQL fails over to a standby in the middle of runs, which continue there by themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from dagster import DagsterInstance
from sqlalchemy.exc import DBAPIError

from noetl_dagster import embedded
from noetl_dagster.cli.doctor import CheckState
from noetl_dagster.cli.doctor.checks import server_checks
from noetl_dagster.compiler.executors.storages import keep_connections
from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import LostEventsError
from noetl_dagster.events.connection import DATABASE_AWAY, connect
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.settings import EventTransport, Settings
from tests.chaos.postgres_pair import PostgresPair, postgres_pair
from tests.ledger import assert_only_unfinished_ran_again, lines, written_by
from tests.playbooks import playbook
from tests.pool import working
from tests.service.conftest import Service, serving
from tests.waiting import until
from tests.whole import Fan, warm

LOOP = f"""
workload: {{ledger: "", items: 10}}
workflow:
  - step: each
    loop: {{in: "{{{{ range(items) | list }}}}", iterator: n, mode: parallel, max_in_flight: 4}}
    tool: {written_by("False")}
    next: [total]
  - step: total
    tool: {{kind: python, input: {{items: "{{{{ each.results }}}}"}}, code: "result = [len(items), sum(items)]"}}
"""
HOLDS = """
import pathlib, time
path = pathlib.Path(ledger)
with path.open("a") as file:
    file.write(f"{n} 0\\n")
while not path.with_name(f"go{n // 20}").exists():
    time.sleep(0.02)
result = n
"""
"""Writes its ``n`` to the ledger, and waits for the file of its twenty."""


def holds(n: str) -> str:
    return json.dumps({"kind": "python", "input": {"n": n, "ledger": "{{ ledger }}"}, "code": HOLDS})


HELD = f"""
workload: {{ledger: "", items: 10}}
workflow:
  - step: each
    loop: {{in: "{{{{ range(items) | list }}}}", iterator: n, mode: parallel, max_in_flight: 4}}
    tool: {holds("{{ n }}")}
    next: [total]
  - step: total
    tool: {{kind: python, input: {{items: "{{{{ each.results }}}}"}}, code: "result = [len(items), sum(items)]"}}
"""
STEPS = f"""
workload: {{ledger: ""}}
workflow:
  - step: first
    tool: {holds("{{ 0 }}")}
    next: [second]
  - step: second
    tool: {holds("{{ 20 }}")}
    next: [total]
  - step: total
    tool: {{kind: python, code: "result = [1, 2]"}}
"""
ENDED = """
SELECT current_index FROM noetl.event
WHERE execution_id = $1 AND event_type = 'command.completed' AND current_index IS NOT NULL ORDER BY 1
"""
TOTAL = """
SELECT result -> 'data' FROM noetl.event
WHERE execution_id = $1 AND event_type = 'step.exit' AND node_name = 'total'
"""
CHECKED = ("event log", "Dagster's storage")
ROW = "SELECT status FROM noetl.execution WHERE execution_id = $1"


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="synchronous"), pytest.param(False, id="asynchronous", marks=pytest.mark.slow)],
)
def pair(request: pytest.FixtureRequest) -> Iterator[PostgresPair]:
    with postgres_pair("noetl", "dagster", synchronous=request.param) as made:
        asyncio.run(apply_schema(made.url()))
        yield made


@pytest.fixture
def own(settings: Settings, pair: PostgresPair) -> Settings:
    """Settings whose databases are those of the pair."""
    return settings.model_copy(
        update={
            **{"db_url": pair.url(), "dagster_db_url": pair.url("dagster"), "event_transport": EventTransport.NATS},
            **{"worker_heartbeat_seconds": 20.0, "command_heartbeat_timeout_seconds": 600.0},
        }
    )


@asynccontextmanager
async def pooled(own: Settings) -> AsyncIterator[tuple[Service, Engine]]:
    """A driver, two workers, and the HTTP API with its ingestor and projection."""
    async with serving(own) as service:
        engine = await Engine.open(service.settings)
        async with working(service.settings, "w1", worker_slots=4), working(service.settings, "w2", worker_slots=4):
            await warm(engine)
            yield service, engine
        await engine.close()


async def test_everything_continues_on_the_standby(own: Settings, pair: PostgresPair, tmp_path: Path) -> None:
    async with pooled(own) as (service, engine):
        await until_streamed(pair, engine)
        fan = await Fan.start(engine, tmp_path, 120)
        ledger = tmp_path / "loop.ledger"
        looped = asyncio.create_task(engine.run(playbook(LOOP), {"ledger": str(ledger), "items": 120}))
        await fan.until_done(40)
        assert not fan.is_over, "it was to fail over in the middle"
        await asyncio.to_thread(pair.fail_over)
        state = await looped
        assert state.status is ExecutionStatus.COMPLETED, state.error
        assert await engine.runtime.pool.fetchval(TOTAL, state.execution_id) == [120, sum(range(120))]
        assert sorted(n for n, _ in lines(ledger)) == [*range(120)]
        await fan.is_whole()

        async def is_projected() -> bool:
            return await engine.runtime.pool.fetchval(ROW, fan.execution_id) == "COMPLETED"

        await until(is_projected, "the projection")
        answer = await service.client.get(f"/api/executions/{fan.execution_id}")
        assert answer.status_code == 200, answer.text
    await asyncio.to_thread(pair.add_standby)


async def until_streamed(pair: PostgresPair, engine: Engine) -> None:
    """Waits until the standby has what was committed so far."""

    async def has_all() -> bool:
        return bool(await engine.runtime.pool.fetchval("SELECT sent_lsn = replay_lsn FROM pg_stat_replication"))

    await until(has_all, "the standby to have it all")


async def test_a_standby_is_an_outage(pair: PostgresPair) -> None:
    with pytest.raises(asyncpg.TargetServerAttributeNotMatched) as caught:
        await connect(pair.url_of(pair.standby, "noetl"))
    assert isinstance(caught.value, DATABASE_AWAY)


async def test_the_primary_is_found_whichever_host_it_is(own: Settings, pair: PostgresPair) -> None:
    """By the log's connections, by Dagster's storage, and by the checks of both."""
    found = {check.name: await check.find() for check in server_checks(own) if check.name in CHECKED}
    assert {name: finding.state for name, finding in found.items()} == dict.fromkeys(CHECKED, CheckState.OK), found
    with DagsterInstance.from_config(str(embedded.dagster_home(own))) as instance:
        keep_connections(instance)
        assert instance.get_runs_count() == 0
        log = await connect(pair.url())
        await asyncio.to_thread(pair.fail_over)
        await until(log.is_closed, "the loss of the connection")
        log = await connect(pair.url())
        assert await log.fetchval("SELECT inet_server_port()") == pair.primary.port
        await log.close()

        async def is_answered() -> bool:
            with suppress(DBAPIError):
                return instance.get_runs_count() == 0
            return False

        await until(is_answered, "Dagster's storage")


@asynccontextmanager
async def driven(settings: Settings, text: str, workload: dict[str, Any]) -> AsyncIterator[Lossy]:
    """An execution that this process drives, over a primary with an asynchronous standby."""
    with postgres_pair("noetl", synchronous=False) as pair:
        await apply_schema(pair.url())
        engine = await Engine.open(settings.model_copy(update={"db_url": pair.url()}))
        execution = await engine.lifecycle.create(playbook(text), workload)
        yield Lossy(pair, engine, execution.id, asyncio.create_task(engine.resume(execution.id)))
        await engine.close()


@dataclass(frozen=True, slots=True)
class Lossy:
    """An execution whose log may lose its latest events."""

    pair: PostgresPair
    engine: Engine
    execution_id: int
    running: asyncio.Task[ExecutionState]

    async def ended(self) -> list[int]:
        return [row[0] for row in await self.engine.runtime.pool.fetch(ENDED, self.execution_id)]

    async def until_ended(self, count: int) -> None:
        async def have() -> bool:
            return await self.ended() == [*range(count)]

        await until(have, f"the ends of the first {count}")

    async def lose(self, go: Path, count: int) -> None:
        """Fails over when ``count`` have ended, of which the standby has not those after ``go``."""
        await until_streamed(self.pair, self.engine)
        with self.pair.not_sending():
            await asyncio.to_thread(go.touch)
            await self.until_ended(count)
            await asyncio.to_thread(self.pair.fail_over)

    async def resumed(self) -> Any:
        """Resumes it, and returns the result of its last step."""
        state = await self.engine.resume(self.execution_id)
        assert state.status is ExecutionStatus.COMPLETED, state.error
        return await self.engine.runtime.pool.fetchval(TOTAL, self.execution_id)


async def test_items_whose_ends_are_lost_run_again(settings: Settings, tmp_path: Path) -> None:
    """A driver has seen ends that an asynchronous standby has not: it stops, and no item is silently absent."""
    ledger = tmp_path / "ledger"
    (tmp_path / "go0").touch()
    async with driven(settings, HELD, {"ledger": str(ledger), "items": 60}) as lossy:
        await lossy.until_ended(20)
        await lossy.lose(tmp_path / "go1", 40)
        (tmp_path / "go2").touch()
        with pytest.raises(LostEventsError, match="has no end of 20 of 60 items"):
            await lossy.running
        kept = await lossy.ended()
        assert kept == [*range(20), *range(40, 60)]
        assert await lossy.resumed() == [60, sum(range(60))]
        assert_only_unfinished_ran_again(ledger, 60, kept)


async def test_steps_whose_ends_are_lost_run_again(settings: Settings, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with driven(settings, STEPS, {"ledger": str(ledger)}) as lossy:
        await until(lambda: ledger.exists() and len(lines(ledger)) == 1, "the first step")
        await until_streamed(lossy.pair, lossy.engine)
        with lossy.pair.not_sending():
            (tmp_path / "go0").touch()
            await until(lambda: len(lines(ledger)) == 2, "the second step")
            await asyncio.to_thread(lossy.pair.fail_over)
        (tmp_path / "go1").touch()
        with pytest.raises(LostEventsError, match="has no end of first"):
            await lossy.running
        assert await lossy.resumed() == [1, 2]
        assert [n for n, _ in lines(ledger)] == [0, 20, 0]
