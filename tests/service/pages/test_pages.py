"""Every page of real executions: it shows what happened, and nothing that it shows is markup."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine.executions.watching import LATEST_CHANGES
from noetl_dagster.events.transport.wire import EventMessage
from noetl_dagster.events.types import EventType
from noetl_dagster.service.pages import live
from noetl_dagster.service.pages.charts import histogram
from tests.playbooks import playbook
from tests.service.conftest import Service
from tests.waiting import until

from .hostile import HOSTILE

FLOW = """
workload: {flag: none}
workflow:
  - step: start
    tool: {kind: python, code: "result = [{'id': n, 'name': 'patient'} for n in range(12)]"}
    next: [each]
  - step: each
    loop: {in: "{{ start }}", iterator: patient, mode: fanout}
    spec: {fanout: {max_shard_retries: 0}}
    tool:
      - name: fetch
        kind: python
        input: {n: "{{ iter.patient.id }}"}
        code: |
          if n == 5:
              raise ValueError("patient 5 has no record")
          result = {"rows": [{"id": n, "text": "x" * 9000}]}
        spec:
          policy:
            rules:
              - when: "{{ output.status == 'error' and 'no record' in error.message }}"
                then: {do: retry, attempts: 2, delay: 0}
              - else: {then: {do: continue}}
"""


class Markup(HTMLParser):
    """Collects what a browser would do with a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.bad: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if tag == "script" and not (given.get("src") or "").startswith("/static/"):
            self.bad.append(f"inline script {given}")
        self.bad += [f"{tag} {name}" for name in given if name.startswith("on") or name == "style"]
        for name in ("href", "src", "action"):
            if (address := given.get(name)) is not None:
                self.links.append(address)
                if not address.startswith(("/", "#", "http://127.0.0.1", "?")):
                    self.bad.append(f"{tag} {name}={address}")


async def get(service: Service, path: str, status: int = 200) -> str:
    answer = await service.client.get(path)
    assert answer.status_code == status, f"{path}: {answer.text[-600:]}"
    found = Markup(answer.text)
    assert found.bad == [], path
    return answer.text


async def test_every_page_of_an_execution(service: Service) -> None:
    engine = service.plane.engine
    failed = await engine.run(playbook(FLOW, "flow"))
    id_ = failed.execution_id
    listed = await get(service, "/executions?status=FAILED")
    assert f"/executions/{id_}" in listed
    assert "No execution matches" in await get(service, "/executions/listing?playbook=other")
    assert "is no time" in await get(service, "/executions?since=yesterday")
    shown = await get(service, f"/executions/{id_}")
    assert "patient 5 has no record" in shown
    assert "11 of 12" in shown
    assert re.findall(r'class="marked"><span class="at">(\d+)</span><code>([^<]+)', shown) == [
        ("14", "      - name: fetch")
    ]
    assert "1 failed" in shown
    assert 'data-dialog="resume"' in shown
    step = await get(service, f"/executions/{id_}/steps/each")
    assert "Failures by error" in step
    assert "max_shard_retries" in step  # the step's lines of the playbook
    only = await get(service, f"/executions/{id_}/steps/each?state=failed")
    assert re.findall(r'steps/each/(\d+)\?visit=1">\d', only) == ["5"]
    assert "No iteration matches" in await get(service, f"/executions/{id_}/steps/each?error=other")
    assert "write seconds as" in await get(service, f"/executions/{id_}/steps/each?slower=long")
    one = await get(service, f"/executions/{id_}/steps/each/5")
    assert "&#34;id&#34;: 5" in one
    assert "rule 1, line" in one
    assert "it saw:" in one
    assert 'rel="next"' in one
    assert "loop.fanout.started" not in await get(service, f"/executions/{id_}/steps/each/0")
    assert 'rel="next"' not in await get(service, f"/executions/{id_}/steps/each/11")
    good = await get(service, f"/executions/{id_}/steps/each/4")
    [stored] = re.findall(r'data-load="([^"]+)"', good)
    assert "xxxxxxxx" in await get(service, stored)
    await get(service, stored.replace(str(id_), "12345", 1), 404)
    assert "attempt-1" in await get(service, f"/executions/{id_}/steps/start")
    trail = await get(service, f"/executions/{id_}/events?type=loop.shard.*&index=5")
    assert trail.count("data-event=") == trail.count("<td>loop.shard.") > 1
    events = [
        json.loads(line) for line in (await service.client.get(f"/executions/{id_}/events.jsonl")).text.split("\n")[:-1]
    ]
    of_api = (await service.client.get(f"/api/executions/{id_}/events?limit=5000")).json()["events"]
    assert list(map(EventMessage.model_validate, events)) == list(map(EventMessage.model_validate, of_api))
    earlier = await get(service, f"/executions/{id_}?at={events[3]['event_id']}")
    assert "as it was at event" in earlier
    assert "data-dialog" not in earlier
    for path in (
        "9",
        "9/steps/each",
        "9/events",
        "9/events.jsonl",
        "9/events/live",
        "9/live",
        f"{id_}/steps/other",
        f"{id_}/steps/each/99",
        f"{id_}/steps/each?visit=9",
    ):
        text = await get(service, f"/executions/{path}", 200 if "visit" in path else 404)
        assert "/executions" in text
    await get(service, f"/executions/{id_}/events?index=x", 422)
    await get(service, "/executions/x", 422)
    await get(service, f"/executions/{id_}/events.jsonl?error=%00", 422)
    for position in ("9" * 5_000, "x", "-1"):
        await get(service, f"/executions/{id_}/live?position={position}", 422)
        await get(service, f"/executions/{id_}/events/live?position={position}", 422)


def test_a_histogram_of_one_range_is_no_larger_than_others() -> None:
    drawn = histogram([(0.4, 0.5, 38)], "durations")
    [width] = re.findall(r'viewBox="0 0 (\d+) 160"', drawn)
    assert int(width) >= 450
    assert min(float(x) for x in re.findall(r'<text x="([\d.]+)"', drawn)) >= 20


async def test_why_a_resumption_did_not_begin(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    launcher: Any = service.plane.launcher
    monkeypatch.setattr(launcher, "_address", replace(launcher._address, folder=tmp_path / "file" / "runs"))
    failed = await service.plane.engine.run(
        playbook("workflow: [{step: start, tool: {kind: python, code: 1/0}}]", "gone")
    )
    form = {"cookie": "noetl_form=known", "content-type": "application/x-www-form-urlencoded"}
    address = f"/executions/{failed.execution_id}/resume"
    answer = await service.client.post(address, data={"form_token": "known"}, headers=form)
    assert answer.status_code == 503
    assert "the run server cannot start" in answer.text


async def test_texts_of_playbooks_and_results_are_no_markup(service: Service) -> None:
    engine = service.plane.engine
    words = [text.replace("\x00", "") for text in HOSTILE]
    step = """
    workload: {words: []}
    workflow:
      - step: <b>start
        tool: {kind: python, input: {words: "{{ words }}"}, code: "result = [{w: w} for w in words]"}
        next: [each]
      - step: each
        loop: {in: "{{ words }}", iterator: word, mode: fanout}
        spec: {fanout: {max_shard_retries: 0}}
        tool: {kind: python, input: {word: "{{ iter.word }}"}, code: "raise ValueError(word)"}
    """.replace("<b>start", "start")
    failed = await engine.run(playbook(step, "hostile"), {"words": words})
    id_ = failed.execution_id
    pages = [f"/executions?workload={words[0]}", f"/executions/{id_}", f"/executions/{id_}/steps/start"]
    pages += [f"/executions/{id_}/steps/each", f"/executions/{id_}/events", f"/executions/{id_}/steps/%3Cb%3E"]
    pages += [f"/executions/{id_}/steps/each/{index}" for index in range(len(words))]
    for path in pages:
        answer = await service.client.get(path)
        found = Markup(answer.text)
        assert found.bad == [], path
        assert not {"img", "textarea", "iframe"} & set(found.tags), path
        assert "49" not in re.findall(r"<bdi>(49)</bdi>", answer.text)
        for hidden in ("\u202e", "\x1b", "\x07", "\u2028"):
            assert hidden not in answer.text, path
        assert max(map(len, re.split(r"[\s<>]", answer.text))) < 25_000


async def ask(service: Service, path: str, position: str) -> tuple[list[str], str, bool]:
    """Returns the ids of the events of an answer for a live page, its position, and whether the page need not ask again."""
    answer = await service.client.get(path, params={"position": position} if position else {})
    assert answer.status_code == 200, answer.text
    news = answer.json()
    return re.findall(r'data-event="(\d+)', news["rows"]), news["position"], news["ended"]


async def follow(service: Service, path: str, position: str = "") -> list[str]:
    """Returns the ids of the events that a page gets until the execution has ended."""
    rows: list[str] = []
    ended = False
    while not ended:
        new, position, ended = await ask(service, path, position)
        rows += new
        await asyncio.sleep(0.05)
    return rows


async def test_live_pages_of_a_running_execution_miss_and_repeat_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.05)
    engine, pool = service.plane.engine, service.plane.engine.runtime.pool
    slow = FLOW.replace("result = {", "import time; time.sleep(0.05); result = {").replace("n == 5", "n == 50")
    running = asyncio.create_task(engine.run(playbook(slow, "slow")))
    id_ = (await until(lambda: pool.fetchrow("SELECT execution_id AS id FROM noetl.event LIMIT 1"), "an event"))["id"]
    whole = [follow(service, f"/executions/{id_}/{path}") for path in ("live", "events/live", "live")]

    async def with_breaks(path: str) -> list[str]:
        """Returns what a browser gets whose every second answer is lost, and which pauses in between."""
        rows: list[str] = []
        position, ended = "", False
        while not ended:
            await ask(service, path, position)
            await asyncio.sleep(0.05 + 0.05 * len(rows) % 0.3)
            new, position, ended = await ask(service, path, position)
            rows += new
        return rows

    broken = [with_breaks(f"/executions/{id_}/{path}") for path in ("live", "events/live")]
    found = await asyncio.gather(*whole, *broken)
    state = await running
    assert state.status == "COMPLETED"
    everything = [str(event.event_id) async for event in engine.runtime.log.events(id_)]
    for rows in found:
        assert len(rows) == len(set(rows))
    assert set(found[1]) == set(found[4]) == set(everything)
    assert found[0] == found[2] == found[3]
    assert set(found[0]) < set(everything)


async def test_a_page_of_events_misses_no_commit_before_it_is_live(service: Service) -> None:
    engine, pool = service.plane.engine, service.plane.engine.runtime.pool
    execution = await engine.lifecycle.create(playbook("workflow: [{step: start, tool: {kind: noop}}]"))
    state = (await engine.runtime.load(execution.id)).state
    older = engine.runtime.event(state, EventType.WARNING, "start", "step", "WARNING", {})
    newer = engine.runtime.event(state, EventType.WARNING, "start", "step", "WARNING", {})
    async with pool.acquire() as connection, connection.transaction():
        await engine.runtime.log.append([older], connection=connection)
        await engine.runtime.log.append([newer])
        text = (await service.client.get(f"/executions/{execution.id}/events")).text
    [address] = re.findall(r'data-live="([^"]+)"', text)
    path, _, position = unescape(address).partition("?&position=")
    await engine.lifecycle.cancel(execution.id)
    rows = await follow(service, path, position)
    shown = re.findall(r'data-event="(\d+)', text)
    assert str(newer.event_id) in shown
    assert str(older.event_id) not in shown
    assert str(older.event_id) in rows


async def test_people_who_watch_together_cause_one_read(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.05)
    engine = service.plane.engine
    execution = await engine.lifecycle.create(playbook("workflow: [{step: start, tool: {kind: noop}}]"))
    watching = [asyncio.create_task(follow(service, f"/executions/{execution.id}/live")) for _ in range(50)]
    pool, counted = engine.runtime.pool, []
    original = pool.fetch

    async def fetch(query: str, *values: Any, **named: Any) -> Any:
        counted.append(query)
        return await original(query, *values, **named)

    monkeypatch.setattr(type(pool), "fetch", lambda self, query, *values, **named: fetch(query, *values, **named))
    await until(
        lambda: len([query for query in counted if query == LATEST_CHANGES]) > 1, "the execution to be read again"
    )
    counted.clear()
    await asyncio.sleep(0.5)
    reads = len([query for query in counted if query == LATEST_CHANGES])
    monkeypatch.undo()
    await engine.lifecycle.cancel(execution.id)
    found = await asyncio.gather(*watching)
    assert reads <= 11
    assert len({tuple(rows) for rows in found}) == 1


async def test_an_execution_that_is_resumed_is_live_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0)
    monkeypatch.setattr(live, "READING_SHARE", 0)
    engine = service.plane.engine
    failed = await engine.run(playbook("workflow: [{step: start, tool: {kind: python, code: 1/0}}]"))
    path = f"/executions/{failed.execution_id}/live"
    first: list[str] = []
    position, ended = "", False
    while not ended:
        new, position, ended = await ask(service, path, position)
        first += new
    assert await ask(service, path, str(2**62)) == ([], str(2**62), False)  # another process has read more
    await engine.lifecycle.resume(failed.execution_id)
    further: list[str] = []
    while not further:  # until no older transaction runs
        further, _, ended = await ask(service, path, position)
    assert not set(further) & set(first)
    assert not ended


async def test_a_page_is_live_while_an_older_transaction_runs(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0)
    monkeypatch.setattr(live, "READING_SHARE", 0)
    engine, pool = service.plane.engine, service.plane.engine.runtime.pool

    async def news(position: str) -> dict[str, Any]:
        answer = await service.client.get(f"/executions/{execution.id}/live", params={"position": position})
        found: dict[str, Any] = answer.json()
        return found

    async with pool.acquire() as older, older.transaction():
        await older.fetchval("SELECT pg_current_xact_id()")
        execution = await engine.lifecycle.create(playbook("workflow: [{step: start, tool: {kind: noop}}]"))
        text = (await service.client.get(f"/executions/{execution.id}")).text
        [of_page] = re.findall(r"/live\?position=(\d+)", text)
        await engine.drive(execution)
        before = await news(of_page)
        assert before["position"] == of_page
        assert "COMPLETED" in before["parts"]["summary"], "the page does not show it"
        meanwhile = await news(before["position"])
        assert meanwhile["position"] == before["position"]
        assert "COMPLETED" in meanwhile["parts"]["summary"]
        assert (meanwhile["rows"].strip(), meanwhile["ended"]) == ("", False)

    async def has_ended() -> dict[str, Any] | None:
        after = await news(before["position"])
        return after if after["ended"] else None

    after = await until(has_ended, "the end")
    assert "playbook.completed" in after["rows"]

    async def is_further() -> dict[str, Any] | None:
        await pool.fetchval("SELECT pg_current_xact_id()")
        further = await news(after["position"])
        return further if int(further["position"]) > int(after["position"]) else None

    further = await until(is_further, "a later transaction")
    assert not (await news(further["position"]))["parts"]
