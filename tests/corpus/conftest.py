"""One engine and one web service for a module's playbooks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings

from .expectation import FOLDER
from .server import serving

TOKEN = "token-never-to-be-logged"


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest.fixture(scope="module")
def corpus_settings(module_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with the corpus as the folder of playbooks, and its credentials."""
    credentials = tmp_path_factory.mktemp("credentials") / "credentials.json"
    known = {
        "corpus_token": {"type": "bearer", "data": {"token": TOKEN}},
        "corpus_secret": {"type": "secret", "data": {"value": "corpus-client-secret"}},
    }
    credentials.write_text(json.dumps(known))
    return module_settings.model_copy(
        update={"default_postgres_credential": "embedded", "credentials_file": credentials, "playbooks_path": FOLDER}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(corpus_settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(corpus_settings)
    yield engine
    await engine.close()
