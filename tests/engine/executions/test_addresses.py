"""Addresses of pages."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.engine.executions.addresses import execution_url, run_url, step_url
from noetl_dagster.settings import Settings


@pytest.mark.parametrize(
    ("values", "base"),
    [
        ({}, "http://127.0.0.1:8700"),
        ({"server_url": "https://api:8700/"}, "https://api:8700"),
        ({"server_url": "https://api:8700", "pages_url": "https://noetl.example.org/noetl/"},
         "https://noetl.example.org/noetl"),
        ({"server_url": "https://api:8700", "pages_url": ""}, "https://api:8700"),
    ],
)  # fmt: skip
def test_addresses_of_executions(values: dict[str, Any], base: str) -> None:
    settings = Settings(**values)
    assert execution_url(settings, 12) == f"{base}/executions/12"
    assert step_url(settings, 12, "load") == f"{base}/executions/12/steps/load"
    assert step_url(settings, 12, "a b/ü?") == f"{base}/executions/12/steps/a%20b%252F%C3%BC%3F"


def test_addresses_of_runs() -> None:
    assert run_url(Settings(), "r1") == "http://127.0.0.1:3000/runs/r1"
    assert run_url(Settings(dagster_url="https://dagster.example.org/ui/"), "r1") == (
        "https://dagster.example.org/ui/runs/r1"
    )
