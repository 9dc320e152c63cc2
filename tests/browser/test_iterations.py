"""One of many iterations is found: by its state, its error, its duration and its index."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest_asyncio
from playwright.async_api import Page, expect

from tests.browser.conftest import Visit
from tests.browser.executions import INVOICES, ran
from tests.service.conftest import Service

FIRST_PAGE = 100
FILTERS: list[tuple[dict[str, str], list[int]]] = [
    ({"State": "failed"}, [17, 136]),
    ({"Error has": "invoice 136 has no"}, [136]),
    ({"Slower than, s": "0.4"}, [40]),
    ({"From index": "236"}, [236, 237, 238, 239]),
    ({"State": "failed", "From index": "100"}, [136]),
    ({"Error has": "'; DROP TABLE noetl.event; --"}, []),
    ({"Error has": "100%_"}, []),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def address(local: Service) -> str:
    """The page of a step with 240 iterations: 17 and 136 failed, and 40 took half a second."""
    found = await ran(local.plane.engine, local.settings.playbooks_path, "invoices", INVOICES)
    return f"/executions/{found}/steps/read"


async def indexes(page: Page) -> list[int]:
    table = page.get_by_role("region", name="Iterations").get_by_role("table")
    return [int(text) for text in await table.locator("tbody td:first-child").all_inner_texts()]


async def test_page_by_page(local: Service, visit: Visit, address: str) -> None:
    page = await (await visit(local)).go(address)

    found = await indexes(page)
    assert len(found) == FIRST_PAGE
    for _ in range(2):
        await page.get_by_role("link", name="Next iterations").click()
        found += await indexes(page)
    assert found == list(range(240))
    await expect(page.get_by_role("link", name="Next iterations")).to_have_count(0)


async def test_filters(local: Service, visit: Visit, address: str) -> None:
    visitor = await visit(local)
    for fields, expected in FILTERS:
        page = await visitor.go(address)
        for label, text in fields.items():
            if label == "State":
                await page.get_by_role("combobox", name=label).select_option(text)
            else:
                await page.get_by_label(label, exact=True).fill(text)
        await page.get_by_role("button", name="Filter").click()
        await page.wait_for_url(lambda url: "?" in url)

        assert await indexes(page) == expected, fields
        query = parse_qs(urlsplit(page.url).query)
        await page.get_by_role("button", name="Filter").click()
        await page.wait_for_load_state()
        assert parse_qs(urlsplit(page.url).query) == query, f"the form keeps what was asked for: {fields}"


async def test_the_slowest_first(local: Service, visit: Visit, address: str) -> None:
    page = await (await visit(local)).go(address)

    await page.get_by_role("link", name="Slowest first").click()

    assert (await indexes(page))[0] == 40
