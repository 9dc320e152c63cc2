"""The ASGI application: routes, paging, and injected faults, which retries overcome.

The fault of an attempt depends on the seed, the request and the attempt number that the client sends as ``X-Attempt``.
So a run that sends the number meets the same faults if it has the same seed.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .records import (
    PAGE_SIZE,
    DataType,
    RecordBook,
    mix,
    number_of,
    patient_id,
    share,
)

MOST_ROWS = 1000
"""Largest page size."""

WORST_STREAK = 3
"""Maximum number of consecutive faults of one request; attempt ``WORST_STREAK + 1`` always succeeds."""


class Json(Response):
    """A JSON response, encoded by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encodes the body."""
        return orjson.dumps(content)


class DroppedConnection(Response):
    """Announces a body and sends half of it; the server then closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends half of the body."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        half = self.body[: len(self.body) // 2]
        await send({"type": "http.response.body", "body": half, "more_body": True})


class Fault(StrEnum):
    """The kinds of faults."""

    THROTTLED = "throttled"  # 429 with Retry-After
    BROKEN = "broken"  # 500
    SLOW = "slow"  # the right answer, late
    DROPPED = "dropped"  # the connection closes within the body


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Decides which requests fail.

    Attributes:
        share: share of attempts that fail, 0 to 1; the four kinds are equally frequent.
        slow_seconds: delay of a slow answer.
        retry_after: whole seconds that a throttled client should wait.
    """

    seed: int
    share: float = 0.0
    slow_seconds: float = 0.25
    retry_after: int = 1

    def fault(self, request: str, attempt: int) -> Fault | None:
        """Returns the fault of attempt ``attempt`` (from 1) of a request (its path and query), or None."""
        if not self.share or attempt > WORST_STREAK:
            return None
        bits = mix(self.seed, number_of(request), attempt)
        if share(bits) >= self.share:
            return None
        return list(Fault)[mix(bits) % len(Fault)]


def create_app(
    *, seed: int = 0, faults: float | FaultPlan = 0.0, facilities: int = 5, patients: int = 100
) -> Starlette:
    """Creates the records service.

    Args:
        seed: determines all records.
        faults: share of attempts that fail, or a complete plan.
        facilities: number of facilities in ``GET /facilities``; any other facility can be requested too.
        patients: number of patients of a facility in ``GET /facilities`` and ``GET /expected``.
    """
    book = RecordBook(seed)
    plan = faults if isinstance(faults, FaultPlan) else FaultPlan(seed, faults)

    async def health(request: Request) -> Response:
        return Json({"status": "ok", "seed": seed, "faults": plan.share})

    async def list_facilities(request: Request) -> Response:
        numbers = range(1, facilities + 1)
        listed = [{"facility": n, "facility_id": f"F{n:03d}", "patients": patients} for n in numbers]
        return Json({"data": listed})

    async def expected(request: Request) -> Response:
        facility = request.path_params["facility"]
        numbers = range(1, _whole(request, "patients", default=patients) + 1)
        counts = {
            data_type.value: sum(book.record_count(facility, patient, data_type) for patient in numbers)
            for data_type in DataType
        }
        listed = [patient_id(facility, patient) for patient in numbers]
        return Json({"facility": facility, "patients": listed, "records": counts})

    async def records(request: Request) -> Response:
        answer = _answer(book, request)
        fault = plan.fault(f"{request.url.path}?{request.url.query}", _attempt(request))
        if fault is Fault.THROTTLED:
            headers = {"retry-after": str(plan.retry_after)}
            return Json({"error": "too many requests"}, status_code=429, headers=headers)
        if fault is Fault.BROKEN:
            return Json({"error": "internal error"}, status_code=500)
        if fault is Fault.DROPPED:
            return DroppedConnection(bytes(answer.body))
        if fault is Fault.SLOW:
            await asyncio.sleep(plan.slow_seconds)
        return answer

    routes = [
        Route("/facilities/{facility:int}/patients/{patient:int}/{data_type}", records),
        Route("/health", health),
        Route("/facilities", list_facilities),
        Route("/expected/{facility:int}", expected),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refuse})


def _answer(book: RecordBook, request: Request) -> Json:
    where = request.path_params
    try:
        data_type = DataType(where["data_type"])
    except ValueError:
        known = ", ".join(DataType)
        raise HTTPException(404, f"no data type {where['data_type']!r}; there are {known}") from None
    number = _whole(request, "page", default=1)
    size = min(_whole(request, "pageSize", default=PAGE_SIZE), MOST_ROWS)
    page = book.page(where["facility"], where["patient"], data_type, number, size)
    if data_type is DataType.DEMOGRAPHICS:
        return Json({"data": page.records})
    paging = {"page": number, "pageSize": size, "total": page.total, "hasMore": page.has_more}
    return Json({"data": page.records, "paging": paging})


def _attempt(request: Request) -> int:
    """Returns the attempt that the client reports; without the header, a random number below the limit."""
    sent = request.headers.get("x-attempt", "")
    if sent.isdecimal():
        return int(sent)
    # negative numbers draw from the same share and are never beyond the worst streak
    return -int.from_bytes(os.urandom(4), "big")


def _whole(request: Request, name: str, *, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise HTTPException(400, f"{name} is a whole number from 1, not {text!r}")
    return int(text)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": error.detail}, status_code=error.status_code)
