"""What must hold of every page: for keyboards, screen readers, small screens, and hostile texts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest_asyncio
from playwright.async_api import Page, expect

from noetl_dagster.engine.executions.addresses import in_path
from tests.browser.conftest import AXE, OPERATOR, Visit, Visitor
from tests.browser.executions import INVOICES, STEP, TURNED, hostile_text, ran
from tests.pool import working
from tests.service.conftest import Service

PAGES = {
    "executions": "/executions",
    "filtered executions": "/executions?status=FAILED&playbook=invoices",
    "completed execution": "/executions/{completed}",
    "failed execution": "/executions/{failed}",
    "step": "/executions/{failed}/steps/read",
    "failed iterations": "/executions/{failed}/steps/read?state=failed",
    "iteration": "/executions/{failed}/steps/read/17",
    "events": "/executions/{failed}/events?index=17",
    "unknown execution": "/executions/1",
    "hostile execution": "/executions/{hostile}",
    "hostile step": "/executions/{hostile}/steps/{step}",
    "hostile iteration": "/executions/{hostile}/steps/{step}/0",
    "hostile error": "/executions/{hostile}/steps/{step}/1",
    "hostile events": "/executions/{hostile}/events",
    "playbooks": "/playbooks",
    "playbook": "/playbooks/tests/invoices",
    "hostile playbook": "/playbooks/{path}?execution={hostile}",
    "compared executions": "/compare?left={completed}&right={failed}",
    "hostile comparison": "/compare?left={completed}&right={hostile}",
    "workers": "/workers",
}
FEW = {"count": 30, "wrong": [17], "slow": []}
ABSENT = r"status of 404"
SERIOUS = {"serious", "critical"}
CONTRAST = {"runOnly": ["color-contrast"]}

MISSED = """() => [...document.querySelectorAll("a[href], button, input, select, summary, textarea")]
    .filter((one) => one.type !== "hidden" && !one.disabled && one.tabIndex >= 0 && one.checkVisibility())
    .filter((one) => !window.passed.includes(one) && (one.type !== "radio" || one.checked))
    .map((one) => one.outerHTML.slice(0, 200))"""
FOCUSED = """() => {
    window.passed ??= [];
    const one = document.activeElement;
    if (one === document.body || one === null) return null;
    const style = getComputedStyle(one);
    const last = window.passed.at(-1);
    if (last !== one) window.passed.push(one);
    return {
        name: one.outerHTML.slice(0, 200),
        isSeen: one.type === "datetime-local" || one.matches(":focus-visible") && (style.outlineStyle !== "none"
            || parseFloat(getComputedStyle(one.querySelector(".box")).strokeWidth) > 3),
        isBehind: !last || last === one || Boolean(last.compareDocumentPosition(one) & 4),
    };
}"""
OVERFLOWING = """() => {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return [];
    return [...document.querySelectorAll("body *")]
        .filter((one) => one.getBoundingClientRect().right > width + 1)
        .map((one) => one.outerHTML.slice(0, 150));
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def addresses(local: Service, guarded: Service) -> AsyncIterator[dict[str, str]]:
    """The addresses of all pages, about executions that are in the log."""
    engine, folder = local.plane.engine, local.settings.playbooks_path
    found = {
        "failed": await ran(engine, folder, "invoices", INVOICES, FEW),
        "completed": await ran(engine, folder, "invoices", INVOICES, FEW | {"wrong": []}),
        "hostile": await ran(engine, folder, "hostile", hostile_text()),
        "step": in_path(STEP),
        "path": quote("tests/hostile <b>"),
    }
    async with working(local.settings, f"worker <b>{TURNED}"):
        yield {name: address.format(**found) for name, address in PAGES.items()}


async def opened(visitor: Visitor, addresses: dict[str, str], name: str) -> Page:
    if name.startswith("unknown"):
        visitor.expected = ABSENT
    page = await visitor.go(addresses[name])
    await expect(page.get_by_role("main")).to_be_visible()
    return page


async def findings(page: Page, **options: object) -> list[str]:
    """What axe finds on a page."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text(encoding="utf-8") + ";0")
    run = f"axe.run(document, {json.dumps({'resultTypes': ['violations'], **options})})"
    violations = await page.evaluate(f"{run}.then((found) => found.violations)")
    return [
        f"{one['id']}: {one['help']}: {node['html'][:200]}: {node['failureSummary']}"
        for one in violations
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


async def test_they_are_accessible_and_fit_the_screen(
    guarded: Service, visit: Visit, addresses: dict[str, str]
) -> None:
    known, unknown = await visit(guarded, OPERATOR), await visit(guarded, OPERATOR)
    wrong: dict[str, list[str]] = {}
    for name in PAGES:
        page = await opened(unknown if name.startswith("unknown") else known, addresses, name)
        wrong[name] = []
        for width in (375, 1280):
            await page.set_viewport_size({"width": width, "height": 800})
            wrong[name] += await page.evaluate(OVERFLOWING)
        wrong[name] += await findings(page)
        if not name.startswith(("hostile", "filtered")):  # their colours are those of others
            await page.emulate_media(color_scheme="dark")
            wrong[name] += await findings(page, **CONTRAST)
            await page.emulate_media(color_scheme="light")
    assert {name: problems for name, problems in wrong.items() if problems} == {}


async def test_the_keyboard_reaches_everything(guarded: Service, visit: Visit, addresses: dict[str, str]) -> None:
    for name in ("executions", "failed execution", "failed iterations", "iteration", "compared executions", "playbook"):
        page = await opened(await visit(guarded, OPERATOR), addresses, name)
        await page.evaluate(
            "for (let id = 0; id < 10000; id++) clearTimeout(id)"
        )  # a list that is fetched again has new links
        for _ in range(500):
            await page.keyboard.press("Tab")
            focused = await page.evaluate(FOCUSED)
            if focused is None:
                break
            assert focused["isSeen"], f"{name}: the focus cannot be seen: {focused['name']}"
            assert focused["isBehind"], f"{name}: out of order: {focused['name']}"
        assert await page.evaluate(MISSED) == [], name


async def test_the_skip_link_leads_to_the_content(local: Service, visit: Visit, addresses: dict[str, str]) -> None:
    page = await opened(await visit(local), addresses, "executions")
    skip = page.get_by_role("link", name="Skip to content")

    await page.keyboard.press("Tab")

    await expect(skip).to_be_focused()
    await expect(skip).to_be_in_viewport()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("main")).to_be_focused()
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.querySelector('main').contains(document.activeElement)")


async def test_hostile_texts_are_only_texts(local: Service, visit: Visit, addresses: dict[str, str]) -> None:
    visitor = await visit(local)
    for name in [*(name for name in PAGES if "hostile" in name), "executions"]:
        page = await opened(visitor, addresses, name)
        assert await page.title() != "taken over"
        assert await page.locator("main :is(script, img, [onload], [onerror]), b:text-is('bold')").count() == 0, name
        text = await page.locator("body").inner_text()
        assert not {TURNED[7], "\x1b", "\x07"} & set(text), name
        assert "<b>" in text or name == "executions"


async def test_without_scripts_there_are_links_and_filters(
    local: Service, visit: Visit, addresses: dict[str, str]
) -> None:
    page = await opened(await visit(local, java_script_enabled=False), addresses, "executions")

    await page.get_by_label("Playbook").fill("invoices")
    await page.keyboard.press("Enter")
    await page.get_by_role("link", name=addresses["failed execution"].rpartition("/")[2]).click()
    await page.locator("#steps").get_by_role("link", name="read").click()
    await page.get_by_role("link", name="All failed iterations").click()
    await page.get_by_role("link", name="17", exact=True).click()

    await expect(page.get_by_role("article").first).to_contain_text("invoice 17 has no amount")
