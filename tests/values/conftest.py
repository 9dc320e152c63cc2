"""An engine on a database of its own, and the folder of the children."""

from __future__ import annotations

from pathlib import Path

import pytest

from noetl_dagster.settings import Settings
from tests.engine.conftest import engine

__all__ = ["engine"]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with a small inline limit, so that values are on both sides of it."""
    return settings.model_copy(update={"playbooks_path": Path(__file__).parent, "inline_result_bytes": 1_000})
