"""Spark Connect against a real server: the resource, spark steps, fan-outs, the event log and its replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from noetl_dagster.settings import Settings, dump_settings
from tests.spark.remote.servers import connect_server, run_client

pytestmark = pytest.mark.spark


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    with connect_server(tmp_path) as address:
        yield address


def test_everything_works_over_connect(remote: str, settings: Settings, tmp_path: Path) -> None:
    own = settings.model_copy(update={"spark_remote": remote, "default_postgres_credential": "embedded"})
    done = run_client("-m", "tests.spark.remote.connect_client", dump_settings(own))
    assert done.stdout.endswith("ok\n"), done.stderr[-6000:] + (tmp_path / "server.log").read_text()[-3000:]
