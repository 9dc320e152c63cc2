"""Errors as RFC 9457 problem documents."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from noetl_dagster.errors import (
    EventRefusedError,
    ExecutionNotFoundError,
    ExecutionStateError,
    NoetlError,
    NotDeployedError,
    PlaybookError,
    ReferenceNotAvailableError,
    ServiceError,
    WorkloadError,
    first_invalid,
)
from noetl_dagster.events.connection import DATABASE_AWAY, REFUSED
from noetl_dagster.process.redaction import SECRETS

logger = logging.getLogger(__name__)

STATUS: dict[type[NoetlError], int] = {
    ExecutionNotFoundError: 404,
    ReferenceNotAvailableError: 404,
    ExecutionStateError: 409,
    NotDeployedError: 422,
    EventRefusedError: 422,
    PlaybookError: 422,
    WorkloadError: 422,
    ServiceError: 503,
}

PROBLEM_JSON = "application/problem+json"


class ProblemDocument(BaseModel):
    """The body of every error response."""

    status: int
    title: str
    detail: str


class ApiProblem(HTTPException):
    """An error that becomes a problem document."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": HTTPStatus(status).phrase,
        "content": {PROBLEM_JSON: {"schema": ProblemDocument.model_json_schema()}},
    }
    for status in (400, 401, 403, 404, 409, 413, 415, 422, 429, 503)
}

EXPECTED = (HTTPException, RequestValidationError, NoetlError, *REFUSED, *DATABASE_AWAY)
"""Errors that :func:`problem_of` knows; any other is a defect, and answers 500."""


def problem_response(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a problem document as a response."""
    document = {"status": status, "title": HTTPStatus(status).phrase, "detail": SECRETS.redact(detail)}
    return Response(orjson.dumps(document), status, headers=headers, media_type=PROBLEM_JSON)


def malformed(error: ValidationError | RequestValidationError, *place: str) -> ApiProblem:
    """Returns the problem of a request that its model refuses, naming the first invalid field."""
    return ApiProblem(422, first_invalid(error, *place))


def problem_of(error: Exception, request: str) -> Response:
    """Returns the problem document of an expected error; the database's own texts go to the log with the request."""
    if isinstance(error, RequestValidationError):
        error = malformed(error)
    if isinstance(error, HTTPException):
        return problem_response(error.status_code, str(error.detail), error.headers)
    if isinstance(error, NoetlError):
        status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
        detail = SECRETS.redact(str(error))[:2_000]
        return problem_response(status, detail, {"retry-after": "1"} if status == 503 else None)
    if isinstance(error, REFUSED):
        return problem_response(
            422,
            f"the event log cannot hold this: {type(error).__name__}; integers have at most 64 bits, and text is "
            "Unicode without NUL and lone surrogates",
        )
    logger.warning("%s: %r", request, error)
    return problem_response(503, "the event log does not answer just now", {"retry-after": "1"})


def handle_problems(app: FastAPI) -> None:
    """Registers handlers that answer every expected error with a problem document."""

    async def answer(request: Request, error: Exception) -> Response:
        return problem_of(error, f"{request.method} {request.url.path}")

    for kind in EXPECTED:
        app.add_exception_handler(kind, answer)
