"""Steps joined by ``on: call.partial``: each chunk once, in order, while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus, StepStatus
from noetl_dagster.settings import Settings
from tests.corpus.server import serving
from tests.engine.conftest import Run
from tests.playbooks import playbook
from tests.waiting import until

CHUNKS = """
SELECT node_name, (meta ->> 'chunk_index')::int AS chunk, meta ->> 'row_count' AS rows, result
FROM noetl.event WHERE execution_id = $1 AND event_type = 'call.partial' ORDER BY event_id
"""

CHAIN = """
workload: {pages: 5}
workflow:
  - step: start
    loop: {in: "{{ range(pages) | list }}", iterator: page, spec: {mode: sequential}}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page * 10 + n for n in range(3)]"}
    next: {arcs: [{step: double, on: call.partial}, {step: end}]}
  - step: double
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = [2 * row for row in rows]"}
    next: {arcs: [{step: load, on: call.partial}, {step: after}]}
  - step: load
    loop: {iterator: page}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page['chunk_index'], sum(page['rows'])]"}
    next: [last]
  - step: after
    tool: {kind: python, input: {all: "{{ double.results }}"}, code: "result = len(all)"}
  - step: last
    tool: {kind: python, input: {all: "{{ load.results }}"}, code: "result = all"}
  - step: end
    tool: {kind: python, input: {all: "{{ start.results }}"}, code: "result = len(all)"}
"""


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings.model_copy(update={"chunks_ahead": 4}))
    await engine.runtime.pool.execute("CREATE TABLE loaded (page int)")
    yield engine
    await engine.close()


async def test_a_chain_takes_each_chunk_once_and_in_order(engine: Engine, run: Run) -> None:
    state = await run(CHAIN)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["last"].envelope["data"] == [[n, 60 * n + 6] for n in range(5)]
    assert (state.latest["end"].envelope["data"], state.latest["after"].envelope["data"]) == (5, 5)
    pool = engine.runtime.pool
    told = [(row["node_name"], row["chunk"]) for row in await pool.fetch(CHUNKS, state.execution_id)]
    for step in ("start", "double"):
        assert [chunk for name, chunk in told if name == step] == [0, 1, 2, 3, 4]


async def test_a_tool_that_gives_its_result_at_once_gives_one_chunk(run: Run) -> None:
    state = await run("""
workflow:
  - step: start
    tool: {kind: python, code: "result = {'rows': [{'id': 1}, {'id': 2}], 'note': 'x'}"}
    next: {arcs: [{step: take, on: call.partial}]}
  - step: take
    tool:
      kind: python
      input: {chunk: "{{ chunk }}", rows: "{{ chunk.rows | length }}", note: "{{ chunk.data.note }}"}
      code: "result = [chunk['chunk_index'], chunk['row_count'], chunk['has_more'], rows, note]"
""")
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert [item["data"] for item in state.latest["take"].envelope["results"]] == [[0, 2, False, 2, "x"]]


BRANCHES = """
workload: {pages: 6}
workflow:
  - step: start
    loop: {in: "{{ range(pages) | list }}", iterator: page, spec: {mode: parallel, max_in_flight: 3}}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = {'rows': [page], 'even': page % 2 == 0}"}
    next:
      arcs:
        - {step: evens, on: call.partial, when: "{{ event.payload.data.even }}"}
        - {step: all, on: call.partial}
        - {step: end}
  - step: evens
    tool: {kind: python, input: {page: "{{ chunk.rows[0] }}"}, code: "result = page"}
  - step: all
    loop: {spec: {max_in_flight: 3}}
    tool: {kind: python, input: {page: "{{ chunk.rows[0] }}"}, code: "result = page"}
  - step: end
"""


async def test_several_take_the_chunks_of_one_each_those_that_its_arc_lets_pass(run: Run) -> None:
    state = await run(BRANCHES)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    for step, pages in (("evens", [0, 2, 4]), ("all", [0, 1, 2, 3, 4, 5])):
        envelope = state.latest[step].envelope
        assert sorted(item["data"] for item in envelope["results"]) == pages
        assert (envelope["total"], envelope["done"]) == (len(pages), len(pages))


FAILING = """
workload: {bad: -1, flag: ""}
workflow:
  - step: start
    loop: {in: "{{ range(8) | list }}", iterator: page, spec: {mode: sequential}}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page]"}
    next: {arcs: [{step: change, on: call.partial}]}
  - step: change
    loop: {spec: {max_in_flight: 2 SPEC}}
    tool:
      kind: python
      input: {page: "{{ chunk.rows[0] }}", bad: "{{ bad }}", flag: "{{ flag }}"}
      code: |
        import os
        if page == bad and not os.path.exists(flag):
            raise ValueError('not this one')
        result = [page]
    next: {arcs: [{step: load, on: call.partial}, {step: end}]}
  - step: load
    tool: {kind: postgres, auth: pg_local, command: "INSERT INTO loaded VALUES (:page)", params: {page: "{{ chunk.rows[0] }}"}}
    next: [end]
  - step: end
"""


async def loaded(engine: Engine) -> list[int]:
    return [row["page"] for row in await engine.runtime.pool.fetch("SELECT page FROM loaded ORDER BY ctid")]


@pytest.mark.parametrize("spec", ["", ", allow_partial: true, fail_fast: true"])
async def test_a_chunk_that_fails_stops_those_behind_it_until_it_is_resumed(
    engine: Engine, tmp_path: Path, spec: str
) -> None:
    flag = tmp_path / "mended"
    state = await engine.run(playbook(FAILING.replace("SPEC", spec)), {"bad": 3, "flag": str(flag)})
    assert state.status is ExecutionStatus.FAILED
    assert "not this one" in str(state.error)
    assert await loaded(engine) == [0, 1, 2]
    assert state.ends[("start", 1)].status is StepStatus.COMPLETED
    assert ("load", 1) not in state.ends
    flag.touch()
    state = await engine.resume(state.execution_id)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await loaded(engine) == list(range(8))
    assert state.latest["load"].envelope["done"] == 8


LOADED = "SELECT count(*) FROM noetl.event WHERE node_name = 'load' AND event_type = 'command.completed'"
FAILED_ONCE = """
workload: {flag: ""}
workflow:
  - step: start
    loop: {in: "{{ range(8) | list }}", iterator: page, spec: {mode: sequential}}
    tool:
      kind: python
      input: {page: "{{ page }}", flag: "{{ flag }}"}
      code: |
        import os, time
        while page >= 6 and not os.path.exists(flag):
            time.sleep(0.01)
        result = [page]
    next: [{step: change, on: call.partial}]
  - step: change
    loop: {spec: {max_in_flight: 2, allow_partial: true}}
    tool:
      kind: python
      input: {page: "{{ chunk.rows[0] }}", flag: "{{ flag }}"}
      retry: RETRY
      code: |
        import os
        if page == 3 and not os.path.exists(flag):
            raise ValueError('not this time')
        result = [page]
    next: [{step: load, on: call.partial}]
  - step: load
    tool: {kind: postgres, auth: pg_local, command: "INSERT INTO loaded VALUES (:page)", params: {page: "{{ chunk.rows[0] }}"}}
"""


@pytest.mark.parametrize("retry", ["[]", "[{when: '{{ error }}', then: {max_attempts: 2, delay: 0}}]"])
async def test_what_was_left_out_for_others_is_not_made_by_a_resumed_run(
    engine: Engine, tmp_path: Path, retry: str
) -> None:
    text = FAILED_ONCE.replace("RETRY", retry)
    flag, pool = tmp_path / "mended", engine.runtime.pool
    execution = await engine.lifecycle.create(playbook(text), {"flag": str(flag)})
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    await until(lambda: _is(pool.fetchval(LOADED), 5), "the end of the fifth load")
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
    flag.touch()
    state = await engine.resume(execution.id)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await loaded(engine) == [0, 1, 2, 4, 5, 6, 7]
    change = state.latest["change"].envelope
    assert (change["done"], change["failed"], state.latest["load"].envelope["done"]) == (7, 1, 7)


SOURCE_FAILS = """
workload: {flag: ""}
workflow:
  - step: start
    loop: {in: [0, 1, 2, 3], iterator: page, spec: {mode: sequential, fail_fast: true}}
    tool:
      kind: python
      input: {page: "{{ page }}", flag: "{{ flag }}"}
      code: |
        import os
        if page == 2 and not os.path.exists(flag):
            raise ValueError('no page')
        result = [page]
    next: {arcs: [{step: load, on: call.partial} HANDLED]}
  - step: load
    tool: {kind: postgres, auth: pg_local, command: "INSERT INTO loaded VALUES (:page)", params: {page: "{{ chunk.rows[0] }}"}}
    next: [end]
  - step: end
  - {step: other, tool: {kind: noop}}
"""


async def test_without_the_end_of_the_source_nothing_is_routed(engine: Engine, tmp_path: Path) -> None:
    flag = tmp_path / "mended"
    state = await engine.run(playbook(SOURCE_FAILS.replace("HANDLED", "")), {"flag": str(flag)})
    assert state.status is ExecutionStatus.FAILED
    assert (await loaded(engine), set(state.ends)) == ([0, 1], {("start", 1)})
    flag.touch()
    state = await engine.resume(state.execution_id)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await loaded(engine) == [0, 1, 2, 3]
    assert "end" in state.latest


async def test_a_failure_of_the_source_that_is_handled_leaves_the_takers_out(engine: Engine) -> None:
    text = SOURCE_FAILS.replace("HANDLED", ", {step: other, on: step.failed}")
    state = await engine.run(playbook(text))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.ends[("load", 1)].status is StepStatus.SKIPPED
    assert ("end" in state.latest, "other" in state.latest) == (False, True)


async def test_a_source_that_is_not_admitted_has_no_takers(run: Run) -> None:
    state = await run("""
workflow:
  - {step: begin, tool: {kind: noop}, next: [start]}
  - step: start
    spec: {admit: false}
    tool: {kind: python, code: "result = [1]"}
    next: {arcs: [{step: take, on: call.partial}]}
  - {step: take, tool: {kind: noop}}
""")
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert "take" not in state.visits


async def test_a_taker_that_is_not_admitted_slows_nobody(run: Run) -> None:
    state = await run("""
workflow:
  - step: start
    loop: {in: "{{ range(50) | list }}", iterator: page, spec: {mode: sequential}}
    tool: {kind: noop}
    next: {arcs: [{step: take, on: call.partial}]}
  - {step: take, spec: {admit: false}, tool: {kind: noop}}
""")
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["start"].envelope["done"] == 50


SLOW = """
workload: {gate: ""}
workflow:
  - step: start
    loop: {in: "{{ range(20) | list }}", iterator: page, spec: {mode: sequential}}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page]"}
    next: {arcs: [{step: wait, on: call.partial}]}
  - step: wait
    loop: {spec: {max_in_flight: 2}}
    tool:
      kind: python
      input: {page: "{{ chunk.rows[0] }}", gate: "{{ gate }}"}
      code: |
        import os, time
        while page >= 3 and not os.path.exists(gate):
            time.sleep(0.01)
        result = [page]
    next: {arcs: [{step: load, on: call.partial}]}
  - step: load
    tool:
      kind: python
      input: {page: "{{ chunk.rows[0] }}"}
      code: "result = {'page': page}"
      sink: {tool: postgres, auth: pg_local, table: loaded}
      set: {ctx.sum: "{{ ctx.sum | default(0) + output.data.page }}"}
"""
CLAIMED = """
SELECT count(*) FROM noetl.event
WHERE execution_id = $1 AND node_name = $2 AND event_type = 'command.claimed'
"""
TOLD = (
    "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND node_name = 'start' AND event_type = 'call.partial'"
)


async def test_a_slow_taker_slows_the_source(engine: Engine, tmp_path: Path) -> None:
    gate, pool = tmp_path / "gate", engine.runtime.pool
    execution = await engine.lifecycle.create(playbook(SLOW), {"gate": str(gate)})
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    most = 3 + 2 + engine.runtime.settings.chunks_ahead
    await until(lambda: _is(pool.fetchval(TOLD, execution.id), most), "the stream to fill up")
    await asyncio.sleep(0.5)
    assert await pool.fetchval(TOLD, execution.id) == most
    gate.touch()
    await work
    state = execution.state
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await loaded(engine) == list(range(20))


async def _is(value: Any, wanted: int) -> bool:
    return bool(await value == wanted)


PAGES = """
workload: {api: "", told: 3}
workflow:
  - step: start
    tool: {kind: http, url: "{{ api }}/pages", params: {page: 1, size: 4}}
    retry:
      - when: "{{ response.paging.hasMore }}"
        then:
          max_attempts: 20
          next_call: {params: {page: "{{ response.paging.page + 1 }}"}}
          collect: {strategy: append, path: data}
    next: {arcs: [{step: take, on: call.partial}, {step: end}]}
  - step: take
    tool:
      kind: python
      input: {chunk: "{{ chunk }}"}
      code: "result = [chunk['chunk_index'], [row['id'] for row in chunk['rows']], chunk['has_more']]"
  - step: end
    tool: {kind: python, input: {rows: "{{ start.data }}"}, code: "result = [row['id'] for row in rows]"}
"""


async def test_pages_are_taken_as_they_come(run: Run) -> None:
    with serving() as api:
        state = await run(PAGES, api=api)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    taken = [item["data"] for item in state.latest["take"].envelope["results"]]
    assert [number for number, _, _ in taken] == list(range(len(taken)))
    assert [more for _, _, more in taken] == [True] * (len(taken) - 1) + [False]
    assert [row for _, rows, _ in taken for row in rows] == state.latest["end"].envelope["data"]
    assert len(taken) > 1


async def test_a_task_that_is_called_again_gives_its_own_result_each_time(engine: Engine) -> None:
    settings = engine.runtime.settings.model_copy(update={"chunk_bytes": 1024})
    other = await Engine.open(settings)
    state = await other.run(
        playbook("""
workflow:
  - step: start
    tool:
      - {name: count, kind: noop, set: {step.n: "{{ step.n | default(0) + 1 }}"}}
      - name: read
        kind: postgres
        auth: pg_local
        command: "SELECT n, :turn AS turn FROM generate_series(1, 500) AS n"
        params: {turn: "{{ step.n }}"}
        spec:
          policy:
            rules:
              - {when: "{{ step.n < 3 }}", then: {do: jump, to: count}}
    next: [end]
  - step: end
    tool: {kind: python, input: {row: "{{ start.rows | last }}", count: "{{ start.row_count }}"}, code: "result = [row, count]"}
""")
    )
    await other.close()
    assert state.status is ExecutionStatus.COMPLETED, state.error
    row, count = state.latest["end"].envelope["data"]
    assert (row["n"], int(row["turn"]), count) == (500, 3, 500)


FILTERED = """
workflow:
  - step: start
    loop: {in: "{{ range(8) | list }}", iterator: page, spec: {mode: sequential}}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page]"}
    next: [{step: change, on: call.partial, when: "{{ event.payload.rows[0] != 2 }}"}]
  - step: change
    loop: {spec: {max_in_flight: 2, allow_partial: true}}
    tool:
      kind: python
      input: {page: "{{ chunk.rows[0] }}"}
      code: |
        if page == 4:
            raise ValueError('not this one')
        result = [page]
    next: [{step: again, on: call.partial}]
  - step: again
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = rows"}
    next: [{step: load, on: call.partial}]
  - step: load
    tool: {kind: postgres, auth: pg_local, command: "INSERT INTO loaded VALUES (:page)", params: {page: "{{ chunk.rows[0] }}"}}
"""


async def test_what_is_left_out_on_the_way_holds_up_nobody(engine: Engine) -> None:
    state = await engine.run(playbook(FILTERED))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await loaded(engine) == [0, 1, 3, 5, 6, 7]
    assert state.latest["load"].envelope["done"] == 6


ROWS = """
workload: {rows: 3}
workflow:
  - step: start
    loop: {in: [1, 2], iterator: n, spec: {mode: sequential}}
    tool:
      kind: postgres
      auth: pg_local
      command: "SELECT n, repeat('x', 20) AS text FROM generate_series(1, :rows) AS n"
      params: {rows: "{{ rows }}"}
    next:
      - {step: take, on: call.partial, when: "{{ event.payload.row_count > 0 }}"}
  - step: take
    tool:
      kind: python
      input: {rows: "{{ chunk.rows }}", count: "{{ chunk.row_count }}", length: "{{ chunk.rows | length }}", last: "{{ chunk.data.rows | last }}"}
      code: "result = [len(rows), count, length, last['n']]"
"""


@pytest.mark.parametrize("rows", [3, 6000])
async def test_rows_of_an_iteration_are_the_same_however_many(engine: Engine, settings: Settings, rows: int) -> None:
    other = await Engine.open(settings.model_copy(update={"chunk_bytes": 20_000}))
    state = await other.run(playbook(ROWS), {"rows": rows})
    await other.close()
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert [item["data"] for item in state.latest["take"].envelope["results"]] == [[rows] * 4] * 2


async def test_another_driver_goes_on_with_all_chunks(engine: Engine, settings: Settings, tmp_path: Path) -> None:
    """One that followed until the first died has what that has told meanwhile."""
    gate, pool = tmp_path / "gate", engine.runtime.pool
    other = await Engine.open(engine.runtime.settings)
    execution = await engine.lifecycle.create(playbook(SLOW), {"gate": str(gate)})
    first = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    await until(lambda: pool.fetchval(CLAIMED, execution.id, "start"), "the first driver")
    again = await other.runtime.load(execution.id)
    second = asyncio.create_task(other.walker.run(again))
    most = 3 + 2 + engine.runtime.settings.chunks_ahead
    await until(lambda: _is(pool.fetchval(TOLD, execution.id), most), "the stream to fill up")
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    gate.touch()
    await second
    assert again.state.status is ExecutionStatus.COMPLETED, again.state.error
    assert await loaded(engine) == list(range(20))
    assert again.state.ctx["sum"] == 190
    assert {again.state.latest[name].envelope["done"] for name in ("start", "wait", "load")} == {20}
    await other.close()


TURNS = """
workflow:
  - step: start
    tool:
      - {name: count, kind: noop, set: {step.n: "{{ step.n | default(0) + 1 }}"}}
      - name: read
        kind: postgres
        auth: pg_local
        command: "SELECT n + 100 * :turn::int AS n FROM generate_series(1, 4) AS n"
        params: {turn: "{{ step.n }}"}
        as: rows
        chunk_size: 3
        spec:
          policy:
            rules:
              - {when: "{{ step.n < 3 }}", then: {do: jump, to: count}}
    next: [{step: load, on: call.partial}]
  - step: load
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = [{'page': row['n']} for row in rows]"}
    sink: {tool: postgres, auth: pg_local, table: loaded}
"""


async def test_each_call_of_a_task_goes_on_with_the_stream(engine: Engine) -> None:
    state = await engine.run(playbook(TURNS))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await loaded(engine) == [100 * turn + n for turn in (1, 2, 3) for n in (1, 2, 3, 4)]


RETRIED = """
workload: {flag: ""}
workflow:
  - step: start
    tool:
      kind: python
      input: {flag: "{{ flag }}"}
      code: |
        from pathlib import Path
        for n in range(6):
            if n == 4 and len(Path(flag).read_text()) < 2:
                Path(flag).write_text(Path(flag).read_text() + '.')
                raise ValueError('not this time')
            yield [{'n': n}]
    retry: RETRY
    next: {arcs: [{step: load, on: call.partial}, {step: end}]}
  - step: load
    tool: {kind: postgres, auth: pg_local, command: "INSERT INTO loaded VALUES (:page)", params: {page: "{{ chunk.rows[0].n }}"}}
  - step: end
    tool: {kind: python, input: {rows: "{{ start.data }}"}, code: "result = [row['n'] for row in rows]"}
"""


@pytest.mark.parametrize(
    "retry",
    [
        "{max_attempts: 3, delay: 0}",
        "{max_attempts: 3, delay: 0, retry_on: [python]}",
        "[{when: '{{ error and not error.retryable }}', then: {max_attempts: 3, delay: 0}}]",
    ],
)
async def test_attempts_of_a_retry_give_each_chunk_once(engine: Engine, tmp_path: Path, retry: str) -> None:
    flag = tmp_path / "failures"
    flag.write_text("")
    state = await engine.run(playbook(RETRIED.replace("RETRY", retry)), {"flag": str(flag)})
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await loaded(engine) == list(range(6))
    assert (state.latest["load"].envelope["done"], state.latest["end"].envelope["data"]) == (6, [*range(6)])
    attempts = "SELECT count(*) FROM noetl.event WHERE event_type = 'command.failed'"
    assert await engine.runtime.pool.fetchval(attempts) == 2
