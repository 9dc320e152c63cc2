"""Signing in and out: the token is in a cookie that no script and no other site can use."""

from __future__ import annotations

from playwright.async_api import Page, expect

from tests.browser.conftest import OPERATOR, READER, Visit
from tests.service.conftest import Service

REFUSED = r"status of 40[13]"


async def cookies(page: Page) -> dict[str, dict[str, object]]:
    return {cookie["name"]: dict(cookie) for cookie in await page.context.cookies()}


async def test_a_token_becomes_a_cookie_for_this_site_alone(guarded: Service, visit: Visit) -> None:
    visitor = await visit(guarded)
    page = await visitor.go("/executions?status=FAILED")
    await expect(page).to_have_url(f"{guarded.url}/login?next=/executions%3Fstatus%3DFAILED")
    await expect(page.get_by_label("Token")).to_be_focused()

    await visitor.enter(READER)

    await expect(page).to_have_url(f"{guarded.url}/executions?status=FAILED")
    kept = await cookies(page)
    assert kept
    assert {(one["httpOnly"], one["sameSite"], one["domain"]) for one in kept.values()} == {
        (True, "Strict", "127.0.0.1")
    }
    assert READER in [one["value"] for one in kept.values()]
    assert await page.evaluate("document.cookie") == ""
    assert READER not in await page.content()


async def test_after_signing_out_the_pages_are_closed(guarded: Service, visit: Visit) -> None:
    page = await (await visit(guarded, OPERATOR)).go("/executions")

    await page.get_by_role("button", name="Sign out").click()

    await expect(page).to_have_url(f"{guarded.url}/login")
    assert OPERATOR not in [one["value"] for one in (await cookies(page)).values()]
    await page.go_back()
    await expect(page.get_by_label("Token")).to_be_visible()


async def test_it_leads_to_no_other_site(guarded: Service, visit: Visit) -> None:
    visitor = await visit(guarded)
    for elsewhere in ("//example.org/", "/\\example.org", "https://example.org", "javascript:alert(1)"):
        page = await visitor.go(f"/login?next={elsewhere}")
        await visitor.enter(READER)
        await expect(page).to_have_url(f"{guarded.url}/executions")
        await page.context.clear_cookies()


async def test_without_tokens_nobody_signs_in(local: Service, visit: Visit) -> None:
    page = await (await visit(local)).go("/login")

    await expect(page).to_have_url(f"{local.url}/executions")
    await expect(page.get_by_role("button", name="Sign out")).to_have_count(0)
