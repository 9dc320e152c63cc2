"""Schemathesis sends the HTTP API whatever its OpenAPI document allows, and much that it does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.settings import Settings
from tests.service.conftest import Service, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture
def running(settings: Settings) -> Iterator[Service]:
    """A service on a loop of its own: schemathesis calls synchronously."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = serving(settings, service_rate=100_000)
    service = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(60)
    yield service
    asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_no_request_breaks_it(running: Service) -> None:
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:

        @given(case=operation.as_strategy())
        @limits(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=90, headers={CLIENT_HEADER: "tests"})

        check()
