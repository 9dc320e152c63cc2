"""Workers and control planes of the single form and of the batch form work together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import httpx
import orjson
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noetl_dagster.engine.engine import Engine
from noetl_dagster.pool_worker.single import SingleClaims
from noetl_dagster.settings import EventTransport, Settings
from tests.pool import working
from tests.service.conftest import serving
from tests.waiting import until
from tests.whole import Fan

CLAIMS = """
SELECT worker_id, count(*) FROM noetl.event
WHERE execution_id = $1 AND event_type = 'command.claimed' AND current_index IS NOT NULL GROUP BY 1
"""


class Earlier:
    """The API as it was: no word of batches when a worker registers, and no claims of many."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if path in ("/api/commands/claim", "/api/commands/release"):
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif path == "/api/workers":
            await self._without_batch(scope, receive, send)
        else:
            await self._application(scope, receive, send)

    async def _without_batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {}
        body = b""

        async def keep(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            answer = orjson.loads(body)
            answer.pop("batch", None)
            changed = orjson.dumps(answer)
            others = [(name, value) for name, value in start["headers"] if name != b"content-length"]
            length = (b"content-length", str(len(changed)).encode())
            await send({**start, "headers": [*others, length]})
            await send({"type": "http.response.body", "body": changed})

        await self._application(scope, receive, keep)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"event_transport": EventTransport.NATS})


async def test_our_worker_works_one_by_one_for_an_earlier_control_plane(
    settings: Settings, tmp_path: Path
) -> None:
    async with serving(settings, wrap=Earlier) as service:
        async with httpx.AsyncClient(base_url=service.url) as client:
            report = {"worker_id": "asks", "status": "stopped"}
            assert "batch" not in (await client.post("/api/workers", json=report)).json()
        engine = await Engine.open(service.settings)
        async with working(service.settings, "w1", worker_slots=4) as worker:
            fan = await Fan.start(engine, tmp_path, 60)
            await fan.is_whole()
            assert isinstance(worker._claims, SingleClaims)
        await engine.close()


@pytest.mark.parametrize(
    "items", [80, pytest.param(3_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
async def test_both_forms_share_a_fan_out(settings: Settings, tmp_path: Path, items: int) -> None:
    async with serving(settings) as service, serving(settings, wrap=Earlier) as earlier:
        engine = await Engine.open(service.settings)
        async with (
            working(service.settings, "many", worker_slots=4),
            working(earlier.settings, "single", worker_slots=4),
        ):
            fan = await Fan.start(engine, tmp_path, items, held=items)

            async def both_have_some() -> bool:
                return len(await engine.runtime.pool.fetch(CLAIMS, fan.execution_id)) == 2

            await until(both_have_some, "both to have some")
            fan.go()
            await fan.is_whole()
        claims = Counter(dict(await engine.runtime.pool.fetch(CLAIMS, fan.execution_id)))
        assert set(claims) == {"many", "single"}
        await engine.close()
