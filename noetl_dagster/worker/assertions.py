"""What a task's ``assert`` demands of its input, before it runs, and of its result, after."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.events.envelopes import Envelope
from noetl_dagster.playbook.models import Task
from noetl_dagster.playbook.templates.rendering import Fetch, with_references
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView, holds_key, unwrapped


def check_input(task: Task, given: Mapping[str, Any]) -> None:
    """Raises ``ToolError`` of kind ``schema`` where a key that the task expects is missing."""
    missing = [name for name in task.asserts.expects if name not in given]
    if missing:
        raise ToolError(
            f"task {task.name!r} expects {_named(missing)} in its input, which has {_named(given) or 'nothing'}",
            kind="schema",
        )


async def check_result(
    task: Task, envelopes: Iterable[Envelope], cache: ReferenceCache, fetch: Fetch
) -> None:
    """Raises ``ToolError`` of kind ``schema`` where a key that the task returns is in none of ``envelopes``.

    Args:
        envelopes: the tool's result, and what the task's ``output`` made of it.
    """
    views = [ResultView(envelope, cache) for envelope in envelopes]
    results = [await with_references(partial(unwrapped, view), fetch) for view in views]
    missing = [
        name for name in task.asserts.returns if not any(holds_key(result, name) for result in results)
    ]
    if missing:
        last = results[-1]
        found = (
            f"has {_named(last) or 'nothing'}" if isinstance(last, Mapping) else f"is a {type(last).__name__}"
        )
        raise ToolError(
            f"task {task.name!r} promises {_named(missing)} in its result, which {found}", kind="schema"
        )


def _named(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))
