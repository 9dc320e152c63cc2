"""Code and tables of the guides and of the reference agree with the package."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolCall

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"


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
