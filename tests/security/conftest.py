"""ToolContextes of the tools' tests, without folders that their tests permit."""

from __future__ import annotations

import pytest

from noetl_dagster.tools.base import ToolContext
from tests.tools.conftest import box, log, run

__all__ = ["box", "log", "run"]


@pytest.fixture
def strict(box: ToolContext) -> ToolContext:
    """The toolbox of an installation without further folders."""
    box.settings = box.settings.model_copy(update={"file_folders": ()})
    return box
