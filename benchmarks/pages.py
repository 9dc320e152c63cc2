"""Pages of an execution with many iterations: milliseconds of the first page and of each further one, and what many
people who watch together cost.

    python -m benchmarks.pages --iterations 1000000 --viewers 200

The execution is written into the log with one statement, one iteration in a thousand fails, and a quarter takes 0.1 s
or more. The server runs in this process, and the client on the same machine. The first request of each page is not
counted, since it compiles the templates and reads the pages of the database from disk.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import httpx
import uvicorn

from benchmarks.fanout import database
from noetl_dagster import embedded
from noetl_dagster.cli.api import choose_partition
from noetl_dagster.engine.engine import Engine
from noetl_dagster.launcher.address import Address
from noetl_dagster.launcher.executions import WarmLauncher
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.service.app import create_app
from noetl_dagster.service.plane import Plane
from noetl_dagster.settings import Settings, get_settings

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: pages, path: bench/pages}
workload: {items: [1]}
workflow:
  - step: fetch
    loop: {in: "{{ items }}", iterator: n, mode: fanout}
    tool: {kind: noop}
"""

ITERATIONS = """
INSERT INTO noetl.event (execution_id, event_id, event_type, node_name, node_type, status, meta, current_index,
                         current_item, worker_id, duration, error, result)
SELECT $1::bigint, $2::bigint + n * 4 + place,
       (ARRAY['loop.shard.enqueued', 'command.issued', 'command.claimed',
              CASE WHEN n % 1000 = 7 THEN 'loop.shard.failed' ELSE 'loop.shard.done' END])[place + 1],
       'fetch', 'noop', (ARRAY['dispatched', 'PENDING', 'RUNNING', 'COMPLETED'])[place + 1],
       jsonb_build_object('visit', 1, 'attempt', 1, 'loop_id', $3::text, 'shard_id', $3 || '-' || n, 'iter_index', n,
                          'command_id', $1::bigint::text || ':fetch:1:' || n || ':1', 'final', true),
       n, CASE WHEN place = 0 THEN jsonb_build_object('patient', n) END, CASE WHEN place >= 2 THEN 'worker' END,
       CASE WHEN place = 3 THEN 0.2 * random() * random() + 0.001 END,
       CASE WHEN place = 3 AND n % 1000 = 7 THEN 'GET /patients/' || n || ' answered 503' END,
       CASE WHEN place = 3 THEN '{"status": "ok", "data": 1}'::jsonb END
FROM generate_series(0, $4::int - 1) AS n, generate_series(0, 3) AS place
"""


TRANSACTIONS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"


async def fill(engine: Engine, iterations: int) -> int:
    """Writes an execution whose loop has so many iterations, and returns its id."""
    runtime = engine.runtime
    execution = await engine.lifecycle.create(parse_playbook(PLAYBOOK, file="pages.yaml"))
    state, loop_id = execution.state, str(runtime.ids.next())
    entered = runtime.event(state, "step.enter", "fetch", "step", "RUNNING", {"visit": 1, "epoch": 1})  # type: ignore[arg-type]
    meta = {"visit": 1, "epoch": 1, "loop_id": loop_id, "total_shards": iterations + 1, "mode": "fanout"}
    started = runtime.event(state, "loop.fanout.started", "fetch", "loop", "started", meta)  # type: ignore[arg-type]
    await runtime.log.append([entered, started])
    first = runtime.ids.next()
    await runtime.pool.execute(ITERATIONS, execution.id, first, loop_id, iterations, timeout=1800)
    await runtime.pool.execute("ANALYZE noetl.event")
    with engine.projecting.running():
        await asyncio.sleep(1)
    await engine.projecting.close()
    return execution.id


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[tuple[str, Plane]]:
    """Serves the API in this process."""
    opened: list[Plane] = []
    environment = embedded.environment(settings)

    def launcher(engine: Engine) -> WarmLauncher:
        return WarmLauncher(engine, Address.of(settings.home / "runs", environment, 1))

    @asynccontextmanager
    async def plane() -> AsyncIterator[Plane]:
        opened.append(await Plane.open(settings, launcher, choose_partition))
        yield opened[0]
        await opened[0].close()

    config = uvicorn.Config(create_app(settings, plane), host="127.0.0.1", port=0, log_level="critical")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # so that TCP_NODELAY is set
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", opened[0]
    server.should_exit = True
    await running


async def milliseconds(client: httpx.AsyncClient, path: str, turns: int = 20) -> list[float]:
    """Returns how long a page took, in each turn after the first one."""
    took = []
    for _ in range(turns + 1):
        began = time.perf_counter()
        answer = await client.get(path)
        took.append(1000 * (time.perf_counter() - began))
        assert answer.status_code == 200, (path, answer.status_code)
    return sorted(took[1:])


async def watch(client: aiohttp.ClientSession, url: str, until: asyncio.Event) -> int:
    """Asks every second as a live page does, and returns the number of answers."""
    count, position = 0, "0"
    while not until.is_set():
        async with client.get(url, params={"position": position}) as answer:
            position = (await answer.json())["position"]
        count += 1
        await asyncio.sleep(1)
    return count


async def measure(settings: Settings, iterations: int, viewers: int) -> None:
    """Prints the times of the pages, and the statements and processor time of people who watch."""
    async with served(settings) as (url, plane):
        execution_id = await fill(plane.engine, iterations)
        here = f"/executions/{execution_id}"
        step = f"{here}/steps/fetch"
        pages = {
            "the execution": here,
            "the step: failures, durations, the first 100 iterations": step,
            "iterations from the middle on": f"{step}?first={iterations // 2}",
            "failed ones from the middle on": f"{step}?state=failed&first={iterations // 2}",
            "the slowest": f"{step}?order=slowest&first=0&after=1e9-0",
            "one iteration": f"{step}/{iterations // 2}",
            "200 events": f"{here}/events",
        }
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for name, path in pages.items():
                took = await milliseconds(client, path)
                print(f"{name:60} p50 {statistics.median(took):6.1f} ms, slowest {took[-1]:6.1f} ms", flush=True)
        # a client whose own cost does not grow with the number of connections
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many:
            for number in (1, viewers):
                print(await watched_by(number, many, plane, f"{url}{here}/live"))


async def watched_by(viewers: int, client: aiohttp.ClientSession, plane: Plane, url: str) -> str:
    """Returns what so many people cost who watch an execution for ten seconds."""
    pool, until = plane.engine.runtime.pool, asyncio.Event()
    watching = [asyncio.create_task(watch(client, url, until)) for _ in range(viewers)]
    await asyncio.sleep(5)
    before, cpu = await pool.fetchval(TRANSACTIONS), time.process_time()
    await asyncio.sleep(10)
    after, used = await pool.fetchval(TRANSACTIONS), time.process_time() - cpu
    until.set()
    messages = await asyncio.gather(*watching)
    return (
        f"{viewers} who watch: {(after - before) / 10:.1f} transactions a second, {used * 100:.0f} ms of CPU time "
        f"a second with the client's, {min(messages)} to {max(messages)} answers each"
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--viewers", type=int, default=200)
    given = parser.parse_args()
    with database(embedded.ensure(get_settings())) as settings:
        asyncio.run(measure(settings, given.iterations, given.viewers))


if __name__ == "__main__":
    main()
