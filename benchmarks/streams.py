"""What a chunk costs on its way from step to step.

    python -m benchmarks.streams --chunks 300 --turns 3

Small chunks through python, python and a sink to postgres, joined by arcs ``on: call.partial``, from a loop and from a
generator, beside the same three steps as loops one after another. In turns in one engine; prints the best: chunks a
second, milliseconds, processor time of this process and of PostgreSQL, and events of a chunk. ``--profile`` says where
the time of this process goes. What large results take of memory is measured by ``large_results``.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time
from dataclasses import dataclass

import psutil

from benchmarks.fanout import database
from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings, get_settings

ROWS = 10
"""Rows of a small chunk."""

STEPS = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: arcs, path: bench/arcs}}
workload: {{chunks: 1}}
workflow:
  - step: read
    {reading}
    next: [{{step: convert{on}}}]
  - step: convert
    {converting}
    tool:
      kind: python
      input: {{rows: "{{{{ {rows} }}}}"}}
      code: "result = [{{'id': row['id'], 'cents': row['price'] * 100}} for row in rows]"
    next: [{{step: load{on}}}]
  - step: load
    {loading}
    tool: {{kind: python, input: {{rows: "{{{{ {rows} }}}}"}}, code: "result = rows"}}
    sink: {{tool: postgres, auth: bench, table: cents}}
"""
READ = f"[{{'id': page * {ROWS} + n, 'price': n}} for n in range({ROWS})]"
LOOP = f"""loop: {{in: "{{{{ range(chunks) }}}}", iterator: page}}
    tool: {{kind: python, input: {{page: "{{{{ page }}}}"}}, code: "result = {READ}"}}"""
GENERATOR = f"""tool:
      kind: python
      input: {{chunks: "{{{{ chunks }}}}"}}
      code: |
        def main(chunks):
            for page in range(chunks):
                yield {READ}"""


def over(step: str) -> str:
    return f"""loop: {{in: "{{{{ {step}.results }}}}", iterator: page}}"""


TAKE = "loop: {iterator: page}"
STREAM = {"on": ", on: call.partial", "converting": TAKE, "loading": TAKE, "rows": "page.rows"}
ARCS = {
    "no stream": STEPS.format(reading=LOOP, on="", converting=over("read"), loading=over("convert"), rows="page"),
    "loop": STEPS.format(reading=LOOP, **STREAM),
    "generator": STEPS.format(reading=GENERATOR, **STREAM),
}


@dataclass(frozen=True)
class Chain:
    """What a chunk took on its way through three steps: milliseconds, also of processors, and events."""

    clock: float
    own: float
    postgres: float
    events: float

    def __str__(self) -> str:
        return (
            f"{1000 / self.clock:.0f} chunks a second, {self.clock:.1f} ms a chunk; processor {self.own:.1f} ms "
            f"here, {self.postgres:.1f} ms in postgres; {self.events:.1f} events"
        )


def postgres_seconds(connection_pid: int) -> float:
    """Processor seconds of PostgreSQL's processes, those of sessions that have ended left out."""
    server = psutil.Process(connection_pid).parent()
    assert server is not None
    return sum(sum(one.cpu_times()[:2]) for one in server.children())


async def chain(engine: Engine, text: str, chunks: int) -> Chain:
    """One execution of the three steps, whose rows are in the table once each."""
    pool = engine.runtime.pool
    await pool.execute("TRUNCATE cents")
    server = await pool.fetchval("SELECT pg_backend_pid()")
    playbook = parse_playbook(text)
    postgres, start, own = postgres_seconds(server), time.perf_counter(), time.process_time()
    state = await engine.run(playbook, {"chunks": chunks})
    clock, own = time.perf_counter() - start, time.process_time() - own
    postgres = postgres_seconds(server) - postgres
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await pool.fetchval("SELECT count(DISTINCT id) = count(*) FROM cents")
    assert await pool.fetchval("SELECT count(*) FROM cents") == chunks * ROWS
    events = await pool.fetchval("SELECT count(*) FROM noetl.event WHERE execution_id = $1", state.execution_id)
    each = 1000 / chunks
    return Chain(clock * each, own * each, postgres * each, events / chunks)


async def arcs(settings: Settings, chunks: int, turns: int, profiled: bool) -> None:
    engine = await Engine.open(settings)
    try:
        await engine.runtime.pool.execute("CREATE TABLE cents (id bigint, cents bigint)")
        found: dict[str, Chain] = {}
        for turn in range(turns + 1):  # the first compiles, connects, starts threads
            for name, text in ARCS.items():
                one = await chain(engine, text, chunks if turn else 10)
                if turn:
                    found[name] = min(found.get(name, one), one, key=lambda each: each.clock)
        for name, one in found.items():
            print(f"arcs, {name}: {one}; {one.clock / found['no stream'].clock:.2f} of no stream")
        if profiled:
            for name, text in ARCS.items():
                print(name)
                with cProfile.Profile() as profile:
                    await chain(engine, text, chunks)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    with database(embedded.ensure(get_settings())) as given:
        settings = given.model_copy(update={"default_postgres_credential": "embedded"})
        asyncio.run(arcs(settings, arguments.chunks, arguments.turns, arguments.profile))


if __name__ == "__main__":
    main()
