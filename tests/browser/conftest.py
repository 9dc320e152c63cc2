"""The pages in a real Chromium, over the real API and the embedded services.

All objects of Playwright belong to one event loop, so the tests and fixtures of this folder share the loop of the session.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect
from pydantic import SecretStr

from noetl_dagster.service.access import TOKEN_COOKIE
from noetl_dagster.settings import Settings
from tests.service.conftest import Service, serving

NAMES = ("chromium", "google-chrome", "chromium-browser")
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
PATIENCE_MS = 60_000
"""Far longer than a busy machine needs."""

READER, OPERATOR, WORKER = "token-of-a-reader", "token-of-an-operator", "token-of-a-worker"
TOKENS = SecretStr(f'{{"{READER}": ["reader"], "{OPERATOR}": ["operator"], "{WORKER}": ["pool:default"]}}')

expect.set_options(timeout=PATIENCE_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tests of this folder in the loop of their fixtures."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


class Visitor:
    """A browser context with cookies of its own, its page, and what the browser complained about.

    Attributes:
        expected: a pattern of complaints that the test causes on purpose.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.expected = ""
        self._complaints: list[str] = []
        page.on("dialog", lambda dialog: self._complaints.append(f"{page.url}: opened a dialog: {dialog.message}"))
        page.on("pageerror", lambda error: self._complaints.append(f"{page.url}: {error}"))
        page.on("console", lambda said: said.type == "error" and self._complaints.append(f"{page.url}: {said.text}"))

    async def go(self, path: str) -> Page:
        await self.page.goto(self.url + path)
        return self.page

    async def enter(self, token: str) -> None:
        """Fills the form of ``/login`` and sends it with the Enter key."""
        await self.page.get_by_label("Token").fill(token)
        await self.page.keyboard.press("Enter")

    @property
    def complaints(self) -> list[str]:
        """Errors of scripts, violations of the content security policy, and failed requests."""
        return [one for one in self._complaints if not self.expected or not re.search(self.expected, one)]


Visit = Callable[..., Awaitable[Visitor]]


@pytest.fixture(scope="session")
def chromium() -> str:
    """The executable of the installed Chromium."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed; scripts/browser installs one or reports how")
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=chromium)
        yield opened
        await opened.close()


@pytest.fixture(scope="module")
def own_settings(module_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings for the tests of a module, with a folder of playbooks of its own."""
    return module_settings.model_copy(update={"playbooks_path": tmp_path_factory.mktemp("playbooks")})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def local(own_settings: Settings) -> AsyncIterator[Service]:
    """A service without tokens, for the tests of a module."""
    async with serving(own_settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(own_settings: Settings) -> AsyncIterator[Service]:
    """A service with tokens, over the same log."""
    async with serving(own_settings, service_tokens=TOKENS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def visit(browser: Browser) -> AsyncIterator[Visit]:
    """Opens browser contexts; in the end the browser must have nothing to complain about."""
    visitors: list[Visitor] = []

    async def visit(service: Service, token: str | None = None, **options: Any) -> Visitor:
        context = await browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        visitor = Visitor(await context.new_page(), service.url)
        visitors.append(visitor)
        if token is not None:  # as /login leaves it
            await context.add_cookies([{"name": TOKEN_COOKIE, "value": token, "url": service.url}])
        return visitor

    yield visit
    for visitor in visitors:
        await visitor.page.context.close()
    assert [complaint for visitor in visitors for complaint in visitor.complaints] == []
