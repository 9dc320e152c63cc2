"""Errors as RFC 9457 problem documents."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import asyncpg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from noetl_dagster.errors import (
    EventRefusedError,
    ExecutionNotFoundError,
    ExecutionStateError,
    NoetlError,
    PlaybookError,
    ReferenceNotAvailableError,
    ServiceError,
)
from noetl_dagster.events.connection import DATABASE_AWAY

logger = logging.getLogger(__name__)

STATUS: dict[type[NoetlError], int] = {
    ExecutionNotFoundError: 404,
    ReferenceNotAvailableError: 404,
    ExecutionStateError: 409,
    EventRefusedError: 422,
    PlaybookError: 422,
    ServiceError: 503,
}

UNPROCESSABLE = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)

PROBLEM_JSON = "application/problem+json"


class ProblemDocument(BaseModel):
    """What every error answers with."""

    status: int
    title: str
    detail: str


class Problem(HTTPException):
    """An error that becomes a problem document."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": HTTPStatus(status).phrase,
        "content": {PROBLEM_JSON: {"schema": ProblemDocument.model_json_schema()}},
    }
    for status in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


def problem_response(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    document = ProblemDocument(status=status, title=HTTPStatus(status).phrase, detail=detail)
    return JSONResponse(document.model_dump(), status, headers=headers, media_type=PROBLEM_JSON)


def handle_problems(app: FastAPI) -> None:
    """Has every error answered with a problem document; the database's own texts stay in the log."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem_response(error.status_code, str(error.detail), dict(error.headers or {}))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return problem_response(422, f"{where}: {first['msg']}")

    async def failed(request: Request, error: Exception) -> Response:
        status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
        return problem_response(status, str(error)[:2_000], {"retry-after": "1"} if status == 503 else None)

    async def unprocessable(request: Request, error: Exception) -> Response:
        return problem_response(
            422,
            f"the event log cannot hold this: {type(error).__name__}; integers have at most 64 bits, and text is "
            "Unicode without NUL and lone surrogates",
        )

    async def away(request: Request, error: Exception) -> Response:
        logger.warning("%s %s: %r", request.method, request.url.path, error)
        return problem_response(503, "the event log does not answer just now", {"retry-after": "1"})

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(NoetlError, failed)
    for kind in UNPROCESSABLE:
        app.add_exception_handler(kind, unprocessable)
    for kind in DATABASE_AWAY:
        app.add_exception_handler(kind, away)
