"""The collection of a loop: evaluated once, kept by the log or by reference, read back on resumption."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ToolError
from noetl_dagster.events.connection import encode_json
from noetl_dagster.playbook.scope import Scope
from noetl_dagster.playbook.templates import render_async
from noetl_dagster.storage.refs import ResultRef
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram


async def evaluate_collection(runtime: Runtime, program: StepProgram, scope: Scope) -> list[Any]:
    """The items of a loop, in order.

    Raises:
        ToolError: ``in`` gives something that cannot be iterated over.
        TemplateError: ``in`` cannot be rendered.
    """
    assert program.collection is not None
    value = await render_async(program.collection, scope, runtime.results.get)
    return as_items(value, program.step.name)


def as_items(value: Any, step: str) -> list[Any]:
    """A list as it is; a mapping as its ``{key, value}`` pairs; the JSON text of either parsed.

    Raises:
        ToolError: anything else; names the step and what was found.
    """
    if isinstance(value, (str, bytes)):
        value = _parsed(value, step)
    if isinstance(value, Mapping):
        if isinstance(value.get("results"), list) and "total" in value:  # the result of another loop
            return list(value["results"])
        return [{"key": key, "value": item} for key, item in value.items()]
    if isinstance(value, (Sequence, set, frozenset)):
        return list(value)
    if isinstance(value, Iterable):
        return list(value)
    raise not_a_list(value, step)


def _parsed(text: str | bytes, step: str) -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise not_a_list(text, step) from None
    if not isinstance(value, (list, dict)):
        raise not_a_list(text, step)
    return value


def not_a_list(value: Any, step: str) -> ToolError:
    return ToolError(
        f"step {step}: loop.in gave {type(value).__name__} {str(value)[:80]!r}, which is not a list; "
        "give a list, a mapping, or the JSON text of one",
        kind="loop",
    )


async def keep_collection(
    runtime: Runtime, execution: Execution, step: str, items: list[Any], loop_id: str
) -> dict[str, Any]:
    """The context of ``loop.started``: the items themselves while they are few and small, else a reference."""
    settings = runtime.settings
    if len(items) <= settings.loop_collection_threshold:
        if len(encode_json(items)) <= settings.inline_result_bytes:
            return {"collection": items}
    reference = await runtime.results.put(
        items, execution_id=execution.id, step=step, name=f"collection-{loop_id}"
    )
    return {
        "collection_ref": reference.physical_uri,
        "collection_reference": reference.model_dump(mode="json", exclude_defaults=True),
    }


async def kept_collection(runtime: Runtime, context: dict[str, Any]) -> list[Any]:
    """The items that :func:`keep_collection` kept.

    Raises:
        StorageError: the stored collection cannot be read.
    """
    if "collection" in context:
        return list(context["collection"])
    reference = ResultRef.model_validate(context["collection_reference"])
    return list(await runtime.results.get(reference))
