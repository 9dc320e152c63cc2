"""Dead letters over HTTP and on the command line."""

from __future__ import annotations

import json

from pydantic import SecretStr

from noetl_dagster.events.transport.queries import PUT_DEAD_LETTER
from noetl_dagster.events.transport.wire import encode_event
from noetl_dagster.events.types import Event
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import ended, hold, started
from tests.service.conftest import Service, Start, serving
from tests.waiting import until_now


async def put(service: Service, count: int) -> list[Event]:
    """Puts the ends of commands aside, which w1 holds; returns them."""
    log, names = service.plane.engine.runtime.log, service.plane.client.names
    start = started()
    await log.append([start])
    await hold(log.pool, start.execution_id, count)
    events = [ended(start.execution_id, index) for index in range(count)]
    for event in events:
        subject = names.event_subject("default", "w1", event.execution_id, event.event_type)
        await log.pool.execute(
            PUT_DEAD_LETTER, names.event_stream, subject, encode_event(event), "early", 5, f"{event.event_id}@"
        )
    return events


async def test_letters_are_listed_and_reprocessed(service: Service) -> None:
    events, client = await put(service, 3), service.client
    page = (await client.get("/api/dead-letters", params={"limit": 2})).json()
    assert (page["count"], page["more"], len(page["dead_letters"])) == (3, True, 2)
    letter = page["dead_letters"][0]
    assert (letter["error"], letter["deliveries"], letter["size"]) == ("early", 5, len(encode_event(events[2])))
    [last] = (await client.get("/api/dead-letters", params={"before": page["dead_letters"][1]["id"]})).json()[
        "dead_letters"
    ]
    done = await client.post(f"/api/dead-letters/{last['id']}/reprocess")
    assert done.json() == {"stored": True, "new": 1, "known": 0, "error": None}
    again = await client.post(f"/api/dead-letters/{last['id']}/reprocess")
    assert (again.status_code, f"no dead letter {last['id']}" in again.json()["detail"]) == (404, True)
    await service.plane.engine.runtime.pool.execute("DELETE FROM noetl.queue")
    kept = (await client.post(f"/api/dead-letters/{letter['id']}/reprocess")).json()
    assert (kept["stored"], "another worker has claimed it" in kept["error"]) == (False, True)


async def test_readers_look_and_operators_reprocess(settings: Settings) -> None:
    tokens = json.dumps({"a-reader": ["reader"], "an-operator": ["operator"], "a-worker": ["pool:default"]})
    async with serving(settings, service_tokens=SecretStr(tokens)) as service:
        await put(service, 1)
        statuses = {}
        for token in ("a-worker", "a-reader", "an-operator"):
            headers = {"authorization": f"Bearer {token}"}
            answers = (
                await service.client.get("/api/dead-letters", headers=headers),
                await service.client.post("/api/dead-letters/1/reprocess", headers=headers),
            )
            statuses[token] = [answer.status_code for answer in answers]
    assert statuses == {"a-worker": [403, 403], "a-reader": [200, 403], "an-operator": [200, 200]}


async def test_letters_on_the_command_line(service: Service, start: Start) -> None:
    await put(service, 2)

    def said(*arguments: str) -> tuple[int, str]:
        process = start(service.settings, "dead-letters", *arguments)
        return until_now(lambda: process.popen.poll() is not None and (process.popen.returncode, process.said()))

    assert [one["id"] for one in json.loads(said("list", "--json")[1])] == [2, 1]
    assert "early" in said("list")[1]
    assert said("reprocess", "7") == (1, "dead letter 7: not found; it may have been reprocessed before\n")
    assert said("reprocess", "--all")[1].count("1 events stored, 0 known already") == 2
    assert "no dead letters" in said("list")[1]
