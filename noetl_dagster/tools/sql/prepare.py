"""The statements of a call, whatever runs them: read, split, and with their parameters placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.scripts import sql_text
from noetl_dagster.tools.sql.percent import without_percent
from noetl_dagster.tools.sql.statements import BoundStatement, bind, split_statements

Params = Mapping[str, Any] | Sequence[Any]


async def prepare_statements(call: ToolCall, box: Toolbox) -> list[BoundStatement]:
    """The call's statements with their parameters placed.

    Raises:
        ToolError: without any statement, and for a ``$n`` that has no value.
    """
    params: Params = call.config.get("params") or call.input
    texts = without_percent(await sql_text(call, box), params)
    statements = [statement for text in texts for statement in split_statements(text)]
    if not statements:
        raise ToolError(f"{call.task.kind} in step {call.step} has no SQL in 'command'", kind="schema")
    try:
        return [bind(statement, params) for statement in statements]
    except KeyError as error:
        raise ToolError(
            f"{call.task.kind} in step {call.step}: no value for {error.args[0]}; "
            f"'params' has {len(params)} values",
            kind="schema",
        ) from None
