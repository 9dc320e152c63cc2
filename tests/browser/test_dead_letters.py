"""Dead letters: whatever they contain, they can be read, and reprocessed with one button."""

from __future__ import annotations

from playwright.async_api import expect

from noetl_dagster.settings import Settings
from tests.browser.conftest import Visit
from tests.browser.executions import HOSTILE
from tests.browser.test_every_page import CONTRAST, OVERFLOWING, findings
from tests.service.conftest import serving
from tests.service.pages.test_dead_letters import put

TURN_HOSTILE = """
UPDATE noetl.dead_letter SET payload = convert_to($1, 'UTF8'), error = $1, subject = $1 WHERE dead_letter_id = 2
"""


async def test_they_are_read_and_reprocessed(settings: Settings, visit: Visit) -> None:
    async with serving(settings) as service:
        await put(service, 3)
        await service.plane.engine.runtime.pool.execute(TURN_HOSTILE, HOSTILE)
        visitor = await visit(service, viewport={"width": 375, "height": 800})
        page = await visitor.go("/workers")
        for one in await page.locator("summary").all():
            await one.click()
        assert "\n".join(await findings(page)) == ""
        assert await page.evaluate(OVERFLOWING) == []
        await page.emulate_media(color_scheme="dark")
        assert "\n".join(await findings(page, **CONTRAST)) == ""

        await page.get_by_role("button", name="Reprocess dead letter 3").click()
        await expect(page.get_by_text("Dead letter 3 is no longer here")).to_be_visible()
        await page.get_by_role("button", name="Reprocess dead letter 2").click()
        await expect(page.get_by_text("Dead letter 2 is kept")).to_be_visible()
