"""``retry`` blocks outlive their process: pages are not fetched again, due times are kept."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.overview import overview
from noetl_dagster.engine.executions.progress import running_notes
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook import models
from noetl_dagster.result_ref import RefKind
from tests.corpus.server import serving
from tests.playbooks import playbook

pytestmark = pytest.mark.long

PAGES = """
    workload: {{api: ""}}
    workflow:
      - step: fetch
        {loop}
        tool: {{kind: http, url: "{{{{ api }}}}/pages", params: {{page: 1, size: 4}}}}
        retry:
          - when: "{{{{ response.paging.hasMore }}}}"
            then:
              max_attempts: 20
              delay: 0.1
              next_call: {{params: {{page: "{{{{ response.paging.page + 1 }}}}"}}}}
              collect: {{strategy: append, path: data}}
    """


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with serving() as address:
        yield address


async def events_of(engine: Engine, execution_id: int, type_: EventType) -> list[Event]:
    await engine.runtime.buffer.flush()
    return [event async for event in engine.runtime.log.events(execution_id) if event.event_type == type_]


async def counts(engine: Engine, state: ExecutionState) -> tuple[int, int, int]:
    """Iterations done, failed and in all."""
    await engine.runtime.buffer.flush()
    loop = (await overview(engine.runtime, state.execution_id)).steps[0].loop
    assert loop is not None
    return loop.done, loop.failed, loop.total


async def interrupted(
    engine: Engine, text: str, workload: dict[str, Any], type_: EventType, count: int
) -> ExecutionState:
    """Starts an execution and drops its driver when the log has so many events of a type."""
    execution = await engine.lifecycle.create(playbook(text), workload)
    driver = asyncio.create_task(engine.walker.run(execution))
    while len(await events_of(engine, execution.id, type_)) < count:
        assert not driver.done()
        await asyncio.sleep(0.02)
    driver.cancel()
    with suppress(asyncio.CancelledError):
        await driver
    return execution.state


async def test_pages_of_a_loop_go_on(engine: Engine, api: str) -> None:
    text = PAGES.format(loop="loop: {in: [1, 2, 3], iterator: n, spec: {mode: parallel, max_in_flight: 2}}")
    state = await interrupted(engine, text, {"api": api}, EventType.COMMAND_COMPLETED, 8)
    done, *_ = await counts(engine, state)
    assert 1 <= done <= 3, "iterations, not pages"
    resumed = await engine.resume(state.execution_id)
    assert resumed.status is ExecutionStatus.COMPLETED, resumed.error
    results = resumed.latest["fetch"].envelope["results"]
    assert [len(item["data"]) for item in results] == [23, 23, 23]
    ended = await events_of(engine, state.execution_id, EventType.COMMAND_COMPLETED)
    assert len(ended) == 18
    assert await counts(engine, state) == (3, 0, 3)


FLAKY = """
    workload: {api: ""}
    workflow:
      - step: call
        tool: {kind: http, url: "{{ api }}/flaky/{{ execution_id }}?fails=1"}
        retry:
          - when: "{{ error is defined }}"
            then: {max_attempts: 3, delay: SECONDS}
    """


async def test_a_restart_keeps_the_time_at_which_a_retry_is_due(engine: Engine, api: str) -> None:
    text = FLAKY.replace("SECONDS", "1000")  # the first driver is gone before
    state = await interrupted(engine, text, {"api": api}, EventType.COMMAND_ISSUED, 2)
    await engine.runtime.pool.execute(  # a thousand seconds pass, nearly
        "UPDATE noetl.event SET meta = jsonb_set(meta, '{not_before}', "
        "to_jsonb(extract(epoch FROM clock_timestamp()) + 1.0)) WHERE execution_id = $1 AND meta ? 'not_before'",
        state.execution_id,
    )
    resumed = await engine.resume(state.execution_id)
    assert resumed.status is ExecutionStatus.COMPLETED, resumed.error
    issued = await events_of(engine, state.execution_id, EventType.COMMAND_ISSUED)
    claimed = await events_of(engine, state.execution_id, EventType.COMMAND_CLAIMED)
    assert len(issued) == 2
    assert claimed[-1].created_at is not None
    assert claimed[-1].created_at.timestamp() > issued[-1].meta["not_before"] - 0.05


MANY = """
    workload: {pages: 7}
    workflow:
      - step: fetch
        tool: {kind: python, input: {page: "{{ _attempt }}"}, code: "result = {'rows': [page], 'page': page}"}
        retry:
          - when: "{{ response.page < pages }}"
            then: {THEN}
    """
COLLECTED = "collect: {strategy: append, path: rows}"


async def test_pages_are_as_many_as_there_are(engine: Engine) -> None:
    state = await engine.run(playbook(MANY.replace("THEN", COLLECTED)))

    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["fetch"].envelope["data"] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("then", [COLLECTED, 'next_call: {input: {page: "{{ response.page + 1 }}"}}'])
async def test_pages_that_max_attempts_leaves_out_are_an_error(engine: Engine, then: str) -> None:
    text = MANY.replace("THEN", f"max_attempts: 5, {then}")

    state = await engine.run(playbook(text))
    exact = await engine.run(playbook(text), workload={"pages": 5})

    assert state.status is ExecutionStatus.FAILED
    assert "page 5 is the last that max_attempts allows" in str(state.error)
    resumed = await engine.resume(state.execution_id)
    assert resumed.status is ExecutionStatus.FAILED
    assert exact.status is ExecutionStatus.COMPLETED, exact.error


@pytest.mark.parametrize("path", ["row", "rows.more"])
async def test_a_page_without_what_is_collected_fails_the_step(engine: Engine, path: str) -> None:
    state = await engine.run(playbook(MANY.replace("THEN", COLLECTED.replace("rows", path))))

    assert state.status is ExecutionStatus.FAILED
    assert f"collect: page 1 has no '{path}'" in str(state.error)


async def test_a_failure_is_tried_three_times_where_no_number_is_given(engine: Engine) -> None:
    text = """
        workflow:
          - step: fetch
            tool: {kind: python, input: {n: "{{ _attempt }}"}, code: "if n < LAST: raise ValueError(n)\\nresult = n"}
            retry: [{when: "{{ error is defined }}", then: {delay: 0.01}}]
        """

    third = await engine.run(playbook(text.replace("LAST", "3")))
    fourth = await engine.run(playbook(text.replace("LAST", "4")))

    assert third.latest["fetch"].envelope["data"] == 3
    assert fourth.status is ExecutionStatus.FAILED


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
async def test_an_iteration_whose_second_page_fails_has_failed(engine: Engine, mode: str) -> None:
    code = "if n == 2 and page == 2: raise ValueError('page lost')\\nresult = {'rows': [page], 'more': page < 3}"
    text = f"""
        workflow:
          - step: fetch
            loop: {{in: [1, 2, 3], iterator: n, spec: {{mode: {mode}}}}}
            tool: {{kind: python, input: {{n: "{{{{ n }}}}", page: "{{{{ _attempt }}}}"}}, code: "{code}"}}
            retry:
              - when: "{{{{ response.more }}}}"
                then: {{max_attempts: 5, collect: {{strategy: append, path: rows}}}}
        """

    state = await engine.run(playbook(text))

    assert state.status is ExecutionStatus.FAILED
    assert "1 of 3 iterations failed: item 1: " in str(state.error)
    [done] = await events_of(engine, state.execution_id, EventType.LOOP_DONE)
    assert (done.meta["done"], done.meta["failed"]) == (2, 1)
    assert await counts(engine, state) == (2, 1, 3)


LINKED = """
    workload: {api: ""}
    workflow:
      - step: fetch
        tool: {kind: http, url: "{{ api }}/pages", params: {page: 1, size: 4, stuck: STUCK}}
        retry:
          - when: "{{ response.links.next is defined }}"
            then: {next_call: {NEXT}, collect: {path: data}}
    """
LINK = 'url: "{{ api }}/{{ response.links.next }}"'


async def test_the_address_of_the_next_page_has_its_own_query(engine: Engine, api: str) -> None:
    text = LINKED.replace("NEXT", LINK).replace("STUCK", "99")
    state = await engine.run(playbook(text), workload={"api": api})

    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert [row["id"] for row in state.latest["fetch"].envelope["data"]] == list(range(23))
    issued = await events_of(engine, state.execution_id, EventType.COMMAND_ISSUED)
    assert [event.meta.get("page") for event in issued] == [None, 2, 3, 4, 5, 6]


async def test_a_request_that_changes_by_itself_is_not_the_same(engine: Engine, api: str) -> None:
    text = (
        LINKED.replace("NEXT", "params: {size: 4}").replace("STUCK", "99").replace("page: 1", 'page: "{{ _attempt }}"')
    )
    state = await engine.run(playbook(text), workload={"api": api})

    assert len(state.latest["fetch"].envelope["data"]) == 23, state.error


@pytest.mark.parametrize(
    ("following", "stuck", "message"),
    [
        (LINK, 3, r"page 4 is the same as that of page 3 \(.*page=3"),
        ("params: {page: 1}", 99, "page 2 is the same as that of page 1 "),
    ],
)
async def test_a_request_that_was_made_before_ends_the_sequence(
    engine: Engine, api: str, following: str, stuck: int, message: str
) -> None:
    text = LINKED.replace("NEXT", following).replace("STUCK", str(stuck))
    state = await engine.run(playbook(text), workload={"api": api})
    resumed = await engine.resume(state.execution_id)

    for failed in (state, resumed):
        assert failed.status is ExecutionStatus.FAILED
        assert re.search(message, str(failed.error)), failed.error


async def test_a_link_that_leads_back_is_seen_after_a_restart(engine: Engine, api: str) -> None:
    text = LINKED.replace("NEXT", LINK).replace("STUCK", "3").replace("then: {", "then: {delay: 0.2, ")
    state = await interrupted(engine, text, {"api": api}, EventType.COMMAND_COMPLETED, 2)
    assert await running_notes(engine.runtime.pool, state.execution_id) in ({}, {"fetch": "page 3"})
    resumed = await engine.resume(state.execution_id)

    assert "page 4 is the same as that of page 3" in str(resumed.error)
    assert len(await events_of(engine, state.execution_id, EventType.COMMAND_COMPLETED)) == 3


async def test_a_next_call_that_cannot_be_rendered_fails_the_step(engine: Engine, api: str) -> None:
    text = LINKED.replace("NEXT", 'params: {page: "{{ response.paging.nxt }}"}').replace("STUCK", "99")
    state = await engine.run(playbook(text), workload={"api": api})

    assert "'nxt' is undefined" in str(state.error)


async def test_pages_have_a_limit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PAGES", 6)
    state = await engine.run(playbook(MANY.replace("THEN", COLLECTED)))

    assert "page 6 is the last that max_attempts allows" in str(state.error)


DECLARED = [
    ("pages", {}, "{link: next, rows: data}"),
    ("pages", {"size": 5}, "{next: response.links.next, rows: data}"),
    ("pages", {"size": 5}, "{next: '{{ response.links.next | default(none) }}', rows: response.data}"),
    ("cursor", {}, "{cursor: next, param: after, rows: items}"),
    ("pages", {"size": 5}, "{number: page, until: '{{ not response.paging.hasMore }}', rows: data}"),
    ("pages", {"size": 5, "page": 1}, "{number: page, rows: data}"),  # up to an empty page
    ("pages", {"size": 23}, "{number: page, rows: data}"),
    ("offset", {}, "{offset: skip, limit: 10, total: response.total, rows: items}"),  # the server sends only 8
    ("offset", {}, "{offset: skip, rows: items}"),
]


def _declared(path: str, params: dict[str, Any], pages: str) -> str:
    return f"""
        workload: {{api: ""}}
        workflow:
          - step: fetch
            tool: {{kind: http, url: "{{{{ api }}}}/{path}", params: {params}, pages: {pages}}}
            retry: [{{when: "{{{{ error.retryable }}}}", then: {{max_attempts: 2, delay: 0.01}}}}]
        """


@pytest.mark.parametrize(("path", "params", "pages"), DECLARED)
async def test_declared_pages_bring_every_row_once(
    engine: Engine, api: str, path: str, params: dict[str, Any], pages: str
) -> None:
    state = await engine.run(playbook(_declared(path, params, pages)), workload={"api": api})

    assert state.status is ExecutionStatus.COMPLETED, state.error
    data = state.latest["fetch"].envelope["data"]
    assert [row["id"] if isinstance(row, dict) else row for row in data] == list(range(23))


async def test_declared_pages_end_where_rows_are_lost_meanwhile(engine: Engine, api: str) -> None:
    for pages in ("{offset: skip, total: total, rows: items}", "{offset: skip, rows: items}"):
        state = await engine.run(playbook(_declared("offset", {"shrinks": 1}, pages)), workload={"api": api})
        assert state.latest["fetch"].envelope["data"] == list(range(18)), state.error


async def test_a_failed_page_of_declared_ones_is_tried_again(engine: Engine, api: str) -> None:
    text = _declared("flaky-pages/{{ execution_id }}", {"size": 10}, "{number: page, rows: data, start: 1}")
    state = await engine.run(playbook(text), workload={"api": api})

    assert len(state.latest["fetch"].envelope["data"]) == 23, state.error


@pytest.mark.parametrize(
    ("path", "pages", "message"),
    [
        ("pages", "{next: response.lnks.next, rows: data}", "'lnks' is undefined"),
        ("pages", "{number: page, until: '{{ response.paging.hasMor == false }}'}", "'hasMor' is undefined"),
        ("pages", "{number: page, until: '{{ response.paging.lst }}'}", "'lst' is undefined"),
        ("pages", "{cursor: '{{ response.nxt }}', param: page}", "'nxt' is undefined"),
        ("pages", "{number: page, rows: dta}", "page 1 has no 'dta'"),
        ("cursor", "{offset: after, total: totl, rows: items}", "'totl' is undefined"),
        ("pages", "{link: next, rows: data, max_pages: 2}", "page 2 is the last that max_attempts allows"),
        ("echo?next=http://127.0.0.1:1/x", "{next: query.next}", "127.0.0.1:1/x, another server, which must not get"),
    ],
)
async def test_declared_pages_that_cannot_be_followed_fail(
    engine: Engine, api: str, path: str, pages: str, message: str
) -> None:
    state = await engine.run(playbook(_declared(path, {}, pages)), workload={"api": api})

    assert state.status is ExecutionStatus.FAILED
    assert message in str(state.error)


LARGE = """
    workload: {}
    workflow:
      - step: fetch
        tool:
          kind: python
          input: {page: 1}
          code: |
            result = {"rows": [{"page": page, "place": n, "text": "x" * 700_000} for n in range(2)], "page": page}
        retry:
          - when: "{{ response.page < PAGES }}"
            then:
              max_attempts: 100
              next_call: {input: {page: "{{ response.page + 1 }}"}}
              collect: {strategy: append, path: rows}
      """


def _large(pages: int) -> str:
    return LARGE.replace("PAGES", str(pages))


async def test_large_pages_are_stored_one_by_one_and_are_one_list(engine: Engine) -> None:
    state = await interrupted(engine, _large(6), {}, EventType.COMMAND_COMPLETED, 3)

    resumed = await engine.resume(state.execution_id)

    assert resumed.status is ExecutionStatus.COMPLETED, resumed.error
    ref = resumed.latest["fetch"].envelope["ref"]
    assert ref.kind is RefKind.MANIFEST
    parts = [part async for part in engine.runtime.results.parts(ref)]
    assert [part.rows for part in parts] == [2, 2, 2, 2, 2, 2]
    rows = await engine.runtime.results.get(ref)
    assert [(row["page"], row["place"]) for row in rows] == [(n, i) for n in range(1, 7) for i in (0, 1)]
    assert len(await events_of(engine, state.execution_id, EventType.COMMAND_COMPLETED)) == 6
