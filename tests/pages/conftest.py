"""Pages are followed in an empty folder, with the test's own database, bucket and subjects."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import environment  # noqa: F401  (a fixture)
from tests.conftest import SHORT_LIVED_JVM
from tests.pages.console import Reader, with_programs


@pytest.fixture
def reader(environment: dict[str, str], tmp_path: Path) -> Iterator[Reader]:  # noqa: F811
    """Follows pages in an empty folder."""
    folder, texts = tmp_path / "reader", tmp_path / "texts"
    folder.mkdir()
    texts.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as another:
        port, own = str(free.getsockname()[1]), str(another.getsockname()[1])
    environment["NOETL_SERVICE_PORT"] = own
    replaced = {"8765": port, "HTTP API on http://127.0.0.1:8700": f"HTTP API on http://127.0.0.1:{own}"}
    environment["NOETL_DEFAULT_POSTGRES_CREDENTIAL"] = "embedded"  # as where the services start by themselves
    environment["NOETL_SPARK_DRIVER_JAVA_OPTIONS"] = SHORT_LIVED_JVM
    environment["PYTEST_ADDOPTS"] = "-p no:schemathesis"  # it takes a second to start
    reader = Reader(folder, with_programs(environment, Path(sys.executable).parent), texts, replaced)
    yield reader
    reader.leave()
