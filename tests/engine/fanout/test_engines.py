"""The three engines of a fan-out mean the same: the same results, and the same events but for times and names."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions
from tests.corpus.server import serving
from tests.playbooks import playbook
from tests.pool import working

pytestmark = pytest.mark.spark

EVERYTHING = """
workload: {api: ""}
workflow:
  - step: start
    tool: {kind: noop}
    set: {ctx.seen: []}
    next: [policy]

  - step: policy
    loop: {in: [0, 1, 2, 3], iterator: n}
    spec: {loop_mode: fanout, fanout: {engine: ENGINE}}
    tool:
      - name: call
        kind: python
        input: {n: "{{ n }}", tries: "{{ iter.tries | default(0) }}"}
        code: |
          if n % 2 and tries < 2:
              raise ValueError(f"{n} not yet")
          result = [n, tries]
        spec:
          policy:
            rules:
              - when: "{{ output.status == 'error' }}"
                then: {do: retry, attempts: 5, delay: 0.01, set: {iter.tries: "{{ (iter.tries | default(0)) + 1 }}"}}
      - name: skip
        kind: noop
        spec: {policy: {rules: [{when: "{{ n == 2 }}", then: {do: break}}]}}
      - {name: last, kind: python, input: {found: "{{ call }}"}, code: "result = ['last', *found]"}
    next: [block]

  - step: block
    loop: {in: [0, 1, 2, 3], iterator: n}
    spec: {loop_mode: fanout, fanout: {engine: ENGINE, allow_partial: true}}
    tool:
      kind: python
      input: {n: "{{ n }}", attempt: "{{ _attempt }}"}
      code: |
        if attempt <= n:
            raise ValueError(f"attempt {attempt} of {n}")
        result = [n, attempt]
      retry: [{when: "{{ error is defined }}", then: {max_attempts: 3, delay: 0.01}}]
    next: [pages]

  - step: pages
    loop: {in: [9, 12], iterator: size}
    spec: {loop_mode: fanout, fanout: {engine: ENGINE}}
    tool: {kind: http, url: "{{ api }}/flaky-pages/{{ execution_id }}-{{ size }}", params: {page: 1, size: "{{ size }}"}}
    retry:
      - when: "{{ response.paging.hasMore }}"
        then:
          max_attempts: 20
          next_call: {params: {page: "{{ response.paging.page + 1 }}"}}
          collect: {strategy: append, path: data}
    next: [sink]

  - step: sink
    loop: {in: [{id: 5}, {id: 6}, {id: 7}], iterator: row}
    spec: {loop_mode: fanout, fanout: {engine: ENGINE, iter_key: "row-{{ row.id }}"}}
    tool:
      kind: python
      input: {id: "{{ row.id }}", attempt: "{{ _attempt }}"}
      code: |
        if id == 6 and attempt == 1:
            raise ValueError("not yet")
        result = {"n": id, "tries": attempt}
      sink: {tool: postgres, auth: pg, table: taken, mode: upsert, key: [execution_id, loop_id, shard_id]}
    next: [context]

  - step: context
    loop: {in: [0, 1, 2], iterator: n}
    spec: {loop_mode: fanout, fanout: {engine: ENGINE}}
    tool:
      kind: python
      input: {n: "{{ n }}", rows: "{{ sink.total }}"}
      code: "result = n + rows"
      set: {ctx.seen: "{{ ctx.seen + [output.data] }}"}
    next: [fail]

  - step: fail
    loop: {in: [0, 1, 2], iterator: n}
    spec: {loop_mode: fanout, fanout: {engine: ENGINE, max_shard_retries: 1}}
    tool:
      kind: python
      input: {n: "{{ n }}", seen: "{{ ctx.seen }}"}
      code: "result = [n, seen]"
      spec: {policy: {rules: [{when: "{{ n == 1 }}", then: {do: fail}}]}}
    next: {arcs: [{step: large, when: "{{ fanin.status == 'partial' and fanin.failed == 1 and fanin.done == 2 }}"}]}

  - step: large
    loop: {in: "{{ ['a' * 200000, 'b' * 200000] }}", iterator: text}
    spec: {loop_mode: fanout, fanout: {engine: ENGINE}}
    tool: {kind: python, input: {text: "{{ text }}"}, code: "result = [text[0], len(text)]"}
"""

STEPS = ("policy", "block", "pages", "sink", "context", "fail", "large")


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest.fixture
async def engine(settings: Settings, sessions: SparkSessions) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings, spark=sessions.get)
    yield engine
    await engine.close()


async def test_engines_mean_the_same(engine: Engine, settings: Settings, api: str) -> None:
    await engine.runtime.pool.execute(
        "CREATE TABLE taken (execution_id bigint, loop_id text, shard_id text, n int, tries int, "
        "PRIMARY KEY (execution_id, loop_id, shard_id))"
    )
    states: dict[str, ExecutionState] = {}
    async with AsyncExitStack() as stack:
        for name in ("w1", "w2"):
            await stack.enter_async_context(working(settings, name))
        for name in ("dagster", "workers", "spark"):
            states[name] = await engine.run(playbook(EVERYTHING.replace("ENGINE", name)), {"api": api})
    for name, state in states.items():
        assert state.status is ExecutionStatus.COMPLETED, f"{name}: {state.error}"

    own = states["dagster"]
    assert values(own, "policy") == [["last", 0, 0], ["last", 1, 2], {}, ["last", 3, 2]]
    assert values(own, "block") == [[0, 1], [1, 2], [2, 3], None], "the block bounds its attempts, not the shard"
    assert [[row["id"] for row in rows] for rows in values(own, "pages")] == [list(range(23))] * 2
    assert own.ctx["seen"] == [3, 4, 5]
    assert values(own, "fail") == [[0, [3, 4, 5]], None, [2, [3, 4, 5]]]
    assert values(own, "large") == [["a", 200_000], ["b", 200_000]], "items above the limit of a message"
    for step in STEPS:
        expected = await events(engine, own, step)
        for name in ("workers", "spark"):
            found = await events(engine, states[name], step)
            assert found - expected == expected - found == Counter(), f"{step} on {name}"
            assert plain(states[name], step) == plain(own, step), f"{step} on {name}"
    for state in states.values():
        rows = await engine.runtime.pool.fetch(
            "SELECT n, tries FROM taken WHERE execution_id = $1 ORDER BY n", state.execution_id
        )
        assert [tuple(row) for row in rows] == [(5, 1), (6, 2), (7, 1)]


def values(state: ExecutionState, step: str) -> list[Any]:
    return [item.get("data") for item in state.latest[step].envelope["results"]]


def plain(state: ExecutionState, step: str) -> Any:
    """A step's result without what differs from run to run: durations and addresses."""
    envelope = state.latest[step].envelope
    results = [
        {key: value for key, value in item.items() if key in ("status", "data", "error")}
        for item in envelope["results"]
    ]
    return {**{key: envelope[key] for key in ("status", "total", "done", "failed")}, "results": results}


KEPT = ("visit", "attempt", "iter_index", "iter_key", "shard_attempt", "final", "total_shards", "total_attempts")


async def events(engine: Engine, state: ExecutionState, step: str) -> Counter[bytes]:
    """The events of a step, each as text without ids, times and workers."""
    found: Counter[bytes] = Counter()
    async for event in engine.runtime.log.events(state.execution_id):
        if event.node_name != step or event.event_type == "command.heartbeat":
            continue
        meta = {key: event.meta[key] for key in KEPT if key in event.meta}
        meta["tasks"] = [(task["name"], task["runs"]) for task in event.meta.get("tasks", ())]
        data = (event.result or {}).get("data")
        if isinstance(data, dict) and "status_code" in data:  # of http: times and addresses differ
            data = data["data"]
        parts = [event.event_type, event.status, event.current_index, event.current_item, event.error, data, meta]
        text = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
        found[text.replace(str(state.execution_id).encode(), b"ID")] += 1
    return found
