"""Cancelling and resuming: only operators, after a question, and from the pages alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from playwright.async_api import Page, Route, expect

from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.settings import Settings
from tests.browser.conftest import OPERATOR, READER, TOKENS, Visit
from tests.browser.executions import GATED, INVOICES, ran
from tests.playbooks import playbook
from tests.service.conftest import Service, serving

ELSEWHERE = """
<form method="post" action="{action}"><input name="form_token" value=""><input name="reason" value="forged">
<button>Win a prize</button></form>
"""
FORGED = """async (address) => {
    const fields = new URLSearchParams({form_token: document.querySelector("[name=form_token]").value, reason: "forged"});
    return (await fetch(address, {method: "POST", body: fields})).status;
}"""
REFUSED = r"status of 40[13]"


def state_of(page: Page) -> Any:
    return page.locator("#summary").get_by_role("status")


class Waiting:
    """An execution that runs until its gate opens."""

    def __init__(self, service: Service, gate: Path) -> None:
        self.gate = gate
        self._engine = service.plane.engine
        self.id = 0
        self._running: asyncio.Task[ExecutionState]

    async def start(self) -> None:
        execution = await self._engine.lifecycle.create(playbook(GATED), {"gate": str(self.gate)})
        self.id = execution.id
        self._running = asyncio.create_task(self._engine.resume(self.id))

    async def ended(self) -> ExecutionStatus:
        await asyncio.wait([self._running])
        return (await self._engine.runtime.state(self.id)).status


@pytest_asyncio.fixture(loop_scope="session")
async def waiting(guarded: Service, tmp_path: Path) -> AsyncIterator[Waiting]:
    found = Waiting(guarded, tmp_path / "gate")
    await found.start()
    yield found
    found.gate.touch()
    await found.ended()


async def test_cancelled_after_a_question(guarded: Service, visit: Visit, waiting: Waiting) -> None:
    page = await (await visit(guarded, OPERATOR)).go(f"/executions/{waiting.id}")
    await expect(state_of(page)).to_have_text("running")
    cancel, dialog = page.get_by_role("button", name="Cancel"), page.get_by_role("dialog")

    await cancel.focus()
    await page.keyboard.press("Enter")
    await expect(dialog).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await expect(cancel).to_be_focused()
    await cancel.click()
    await dialog.get_by_role("button", name="Back").click()
    await expect(dialog).to_be_hidden()
    await expect(state_of(page)).to_have_text("running")

    await cancel.click()
    await dialog.get_by_label("Reason").fill("<b>the wrong</b> month")
    await page.keyboard.press("Enter")

    await expect(state_of(page)).to_have_text("cancelled")
    await expect(page.get_by_role("main")).to_contain_text("<b>the wrong</b> month")
    await expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    assert await waiting.ended() is ExecutionStatus.CANCELLED


async def test_resumed_after_the_cause_is_repaired(settings: Settings, visit: Visit, tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    async with serving(settings, service_tokens=TOKENS) as service:
        workload = {"count": 140, "repaired": str(repaired)}
        failed = await ran(service.plane.engine, tmp_path, "invoices", INVOICES, workload)
        page = await (await visit(service, OPERATOR)).go(f"/executions/{failed}/steps/read")
        repaired.touch()

        await page.get_by_role("button", name="Run failed ones again").click()
        await page.get_by_role("dialog").get_by_role("button", name="Run failed ones again").click()

        await page.wait_for_url(f"**/executions/{failed}")
        await expect(state_of(page)).to_have_text("completed")
        await expect(page.locator("#steps").get_by_role("row", name="read")).to_contain_text("140 of 140")
        await expect(page.locator("#summary")).to_contain_text("Resumed")
        await expect(page.get_by_role("button", name="Resume")).to_have_count(0)
        await page.close()


async def test_a_reader_has_no_buttons_and_no_way_round(guarded: Service, visit: Visit, waiting: Waiting) -> None:
    visitor = await visit(guarded, READER)
    visitor.expected = REFUSED
    page = await visitor.go(f"/executions/{waiting.id}")

    await expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    await expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    for action in ("cancel", "resume"):
        assert await page.evaluate(FORGED, f"/executions/{waiting.id}/{action}") == 403
    await page.reload()
    await expect(state_of(page)).to_have_text("running")


async def test_a_form_of_another_site_changes_nothing(guarded: Service, visit: Visit, waiting: Waiting) -> None:
    visitor = await visit(guarded, OPERATOR)
    visitor.expected = REFUSED

    async def elsewhere(route: Route) -> None:
        action = f"{guarded.url}/executions/{waiting.id}/cancel"
        await route.fulfill(body=ELSEWHERE.format(action=action), content_type="text/html")

    await visitor.page.route("http://elsewhere.example/**", elsewhere)
    await visitor.page.goto("http://elsewhere.example/")
    async with visitor.page.expect_navigation() as navigation:
        await visitor.page.get_by_role("button", name="Win a prize").click()
    answer = await navigation.value
    assert answer is not None
    assert answer.status in (401, 403)

    page = await visitor.go(f"/executions/{waiting.id}")
    await expect(state_of(page)).to_have_text("running")
