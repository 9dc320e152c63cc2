"""People watch an execution while its processes are killed, the service starts again, and connections are cut."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.browser.conftest import Visit
from tests.browser.executions import GATED
from tests.playbooks import playbook
from tests.pool_worker.conftest import soon_missed
from tests.processes import killed_in_the_end
from tests.service.conftest import Service, serving
from tests.waiting import until
from tests.whole import FAN, Fan

ITEMS, HELD = 60, 40
DRIVER = """
import asyncio, sys
from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings

async def main(execution_id):
    await (await Engine.open(Settings())).resume(int(execution_id))

asyncio.run(main(sys.argv[1]))
"""
EVENTS = "SELECT event_id FROM noetl.event WHERE execution_id = $1"
SHOWN = """() => [...document.querySelectorAll("#trail [data-event]")].map((row) => row.dataset.event)"""
LOST = r"ERR_(CONNECTION|INCOMPLETE|EMPTY|INTERNET)|status of 503|MIME type"

Start = Callable[..., subprocess.Popen[Any]]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return soon_missed(settings)


@pytest.fixture
def start(settings: Settings) -> Iterator[Start]:
    """Starts Python with some arguments, and further variables of its environment."""

    def start(*arguments: str, **variables: str) -> subprocess.Popen[Any]:
        environment = {"PATH": os.environ["PATH"], **embedded.environment(settings), **variables}
        return start_process([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE)

    with killed_in_the_end() as start_process:
        yield start


@pytest_asyncio.fixture(loop_scope="session")
async def service(settings: Settings) -> AsyncIterator[Service]:
    async with serving(settings) as running:
        yield running


def state_of(page: Page) -> Any:
    return page.locator("#summary").get_by_role("status")


async def shows_every_event(page: Page, service: Service, execution_id: int) -> None:
    """Every event of the log is on the page once."""
    logged = {str(row[0]) for row in await service.plane.engine.runtime.pool.fetch(EVENTS, execution_id)}
    shown = await page.evaluate(SHOWN)
    assert len(shown) == len(set(shown))
    assert set(shown) == logged


async def test_watched_to_its_end_while_everything_is_killed(
    settings: Settings, start: Start, visit: Visit, tmp_path: Path
) -> None:
    ledger = tmp_path / "fan.ledger"
    ledger.touch()
    workload = {"ledger": str(ledger), "items": ITEMS, "held": HELD}
    workers = [start("-m", "noetl_dagster", "worker", "--id", name, "--slots", "4") for name in ("w1", "w2")]
    async with serving(settings) as service:
        execution = await service.plane.engine.lifecycle.create(playbook(FAN), workload)
        driver = start("-c", DRIVER, str(execution.id))
        visitor = await visit(service)
        visitor.expected = LOST
        page = await visitor.go(f"/executions/{execution.id}")
        events = await page.context.new_page()
        await events.goto(f"{service.url}/executions/{execution.id}/events")
        for one in (page, events):
            await one.evaluate("window.first = true")
        fan = Fan.driven_elsewhere(service.plane.engine, ledger, execution.id, ITEMS)
        await until(lambda: len(fan.begun) >= 8, "items that run")
        await expect(page.locator("#steps").get_by_role("row", name="fan")).to_contain_text("running")
        workers[0].kill()
        driver.kill()
        port = urlsplit(service.url).port
    await expect(page.locator("#live")).to_have_text("connection lost, connecting again")

    async with serving(settings, port=port) as service:
        start("-c", DRIVER, str(execution.id))
        start("-m", "noetl_dagster", "worker", "--id", "w3", "--slots", "4")
        await expect(page.locator("#live")).to_have_text("live")
        fan.go()

        await expect(state_of(page)).to_have_text("completed")
        await expect(page.locator("#live")).to_have_text("ended")
        await expect(page.locator("#steps").get_by_role("row", name="fan")).to_contain_text(f"{ITEMS} of {ITEMS}")
        await expect(events.locator("#live")).to_have_text("ended")
        assert await page.evaluate("window.first")
        assert await events.evaluate("window.first")
        await shows_every_event(events, service, execution.id)
        latest = await page.evaluate(SHOWN)
        assert len(latest) == len(set(latest))


async def test_a_connection_that_a_proxy_refuses(service: Service, visit: Visit, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    execution = await service.plane.engine.lifecycle.create(playbook(GATED), {"gate": str(gate)})
    running = asyncio.create_task(service.plane.engine.resume(execution.id))
    refused = []

    async def refuse_once(route: Route) -> None:
        if refused:
            await route.continue_()
        else:
            refused.append(route.request.url)
            await route.fulfill(status=503, body="no server", content_type="text/plain")

    visitor = await visit(service)
    visitor.expected = LOST
    await visitor.page.route("**/live?*", refuse_once)
    page = await visitor.go(f"/executions/{execution.id}/events")
    await expect(page.locator("#live")).to_have_text("connection lost, connecting again")
    gate.touch()
    await running

    await expect(page.locator("#live")).to_have_text("ended")
    assert refused
    await shows_every_event(page, service, execution.id)


async def test_without_a_network_for_a_while(service: Service, visit: Visit, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    visitor = await visit(service)
    visitor.expected = LOST
    page = await visitor.go("/executions")
    await page.context.set_offline(True)
    execution = await service.plane.engine.lifecycle.create(playbook(GATED), {"gate": str(gate)})
    running = asyncio.create_task(service.plane.engine.resume(execution.id))
    await asyncio.sleep(2.5)  # the list is fetched in vain
    await page.context.set_offline(False)

    link = page.get_by_role("link", name=str(execution.id))
    await link.focus()
    async with page.expect_response("**/executions/listing*"):
        pass
    await expect(link).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(state_of(page)).to_have_text("running")
    gate.touch()
    await expect(state_of(page)).to_have_text("completed")
    await running
