"""The guides work as they are written, and their code agrees with the package."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolCall
from tests.pages.console import Reader

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("credentials", 6),
        ("embed", 6),
        ("errors", 3),
        ("exactly-once", 2),
        ("install", 1),
        ("local-development", 4),
        ("pagination", 3),
        pytest.param("spark", 1, marks=[pytest.mark.spark, pytest.mark.slow]),
        ("streams", 1),
        ("transfers", 1),
        ("watch-executions", 6),
        ("workers", 2),
    ],
)
def test_a_guide_prints_what_it_shows(name: str, commands: int, reader: Reader) -> None:
    assert reader.follow(GUIDES / f"{name}.md") == commands


async def test_the_tool_of_the_guide() -> None:
    [code] = re.findall(r"```python\n(.*?)```", (GUIDES / "write-a-tool.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, type] = {}
    exec(code, names)  # the guide's own code

    def call(**config: object) -> ToolCall:
        return ToolCall(1, "start", SimpleNamespace(kind="greet"), config, {})  # type: ignore[arg-type]

    tool = names["GreetTool"]()
    assert (await tool.run(call(name="Ada", times=2), None)).data == ["Hello Ada", "Hello Ada"]
    with pytest.raises(ToolError, match="greet in step start: 'name' is missing"):
        await tool.run(call(), None)
