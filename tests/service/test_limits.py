"""The rate limit alone: as many requests as the setting says, and when there is room again."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.responses import JSONResponse

from noetl_dagster.service.requests import RequestChecks
from noetl_dagster.service.tokens import parse_tokens


@pytest.mark.parametrize(
    ("rate", "requests", "seconds"),
    [(5.0, 5, 1), (2.5, 2, 1), (0.75, 1, 2), (0.1, 1, 10)],
)
async def test_a_client_above_its_rate(rate: float, requests: int, seconds: int) -> None:
    async def healthy(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse({})(scope, receive, send)

    tokens = parse_tokens(SecretStr('{"one": ["reader"], "other": ["reader"]}'))
    checks = RequestChecks(healthy, tokens=tokens, body_bytes=10, rate=rate)
    transport = httpx.ASGITransport(checks)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        one, other = ({"authorization": f"Bearer {name}"} for name in ("one", "other"))
        answers = [await client.get("/", headers=one) for _ in range(requests + 1)]
        assert [answer.status_code for answer in answers] == [200] * requests + [429]
        assert answers[-1].headers["content-type"] == "application/problem+json"
        pause = float(answers[-1].headers["retry-after"])
        assert 0 < pause <= seconds
        assert (await client.get("/", headers=other)).status_code == 200
        if seconds <= 3:
            await asyncio.sleep(pause)
            assert (await client.get("/", headers=one)).status_code == 200
