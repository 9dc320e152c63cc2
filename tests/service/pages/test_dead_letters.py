"""Dead letters on the page of workers, and on the command line."""

from __future__ import annotations

import json
import re

from pydantic import SecretStr

from noetl_dagster.events.transport.queries import PUT_DEAD_LETTER
from noetl_dagster.events.transport.wire import encode_event
from noetl_dagster.events.types import Event
from noetl_dagster.service.pages.workers import SHOWN_LETTERS
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import ended, hold, started
from tests.service.conftest import Service, Start, serving
from tests.waiting import until_now

FORM = {"content-type": "application/x-www-form-urlencoded"}


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


async def page_of(service: Service, address: str = "/workers") -> str:
    answer = await service.client.get(address)
    assert answer.status_code == 200, answer.text
    return answer.text


async def reprocess(service: Service, letter: int, token: str) -> str:
    """Presses the button of a letter; returns where it leads."""
    answer = await service.client.post(
        f"/dead-letters/{letter}/reprocess", content=f"form_token={token}", headers=FORM, follow_redirects=False
    )
    return str(answer.headers.get("location", answer.status_code))


async def test_letters_are_shown_and_reprocessed(service: Service) -> None:
    assert "No dead letters: the log has taken every message" in await page_of(service)
    await put(service, SHOWN_LETTERS + 1)
    page = await page_of(service)
    assert f"{SHOWN_LETTERS + 1} messages of workers" in page
    assert page.count("early") == SHOWN_LETTERS
    older = re.search(r'href="(/workers\?letters_before=\d+)#dead-letters"', page)
    assert older is not None
    assert (await page_of(service, older[1])).count("early") == 1
    token = re.search(r'action="/dead-letters/.*?name="form_token" value="([^"]+)"', page, re.DOTALL)
    assert token is not None
    assert await reprocess(service, 1, "wrong") == "403"
    assert await reprocess(service, 1, token[1]) == "/workers?reprocessed=1#dead-letters"
    assert "Dead letter 1 is no longer here" in await page_of(service, "/workers?reprocessed=1")
    await service.plane.engine.runtime.pool.execute("DELETE FROM noetl.queue")
    await reprocess(service, 2, token[1])
    assert "Dead letter 2 is kept: the command has ended" in await page_of(service, "/workers?reprocessed=2")
    await page_of(service, f"/workers?reprocessed={'9' * 30}&letters_before=x")


async def test_content_is_text_and_readers_have_no_button(settings: Settings) -> None:
    tokens = json.dumps({"a-reader": ["reader"]})
    async with serving(settings, service_tokens=SecretStr(tokens)) as service:
        await put(service, 1)
        await service.plane.engine.runtime.pool.execute(
            "UPDATE noetl.dead_letter SET payload = convert_to('<script>alert(1)</script>', 'UTF8'), error = '<b>no</b>'"
        )
        service.client.headers["authorization"] = "Bearer a-reader"
        page = await page_of(service)
        assert "&lt;script&gt;alert(1)" in page
        assert "<b>no</b>" not in page
        assert "Reprocess" not in page
        assert await reprocess(service, 1, "any") == "403"


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
