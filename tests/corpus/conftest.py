"""One engine and one web service for a module's playbooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings

from .expectation import FOLDER
from .server import serving


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(module_settings: Settings) -> AsyncIterator[Engine]:
    settings = module_settings.model_copy(
        update={"default_postgres_credential": "embedded", "playbooks_path": FOLDER}
    )
    engine = await Engine.open(settings)
    yield engine
    await engine.close()
