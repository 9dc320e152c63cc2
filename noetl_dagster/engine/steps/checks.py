"""The checks of a step, evaluated over its result before the step ends."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import NoetlError
from noetl_dagster.events.envelopes import ERROR, OK, Envelope
from noetl_dagster.events.queries import SINK_PARTS
from noetl_dagster.events.state import CheckOutcome
from noetl_dagster.playbook.assets import CheckSpec, CheckVerdict
from noetl_dagster.playbook.templates.rendering import Compiled, with_references
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.tools.sinks.parts import PartSinks
from noetl_dagster.tools.sinks.place import PartPlace, part_prefix
from noetl_dagster.worker.execution import Visit

if TYPE_CHECKING:
    from noetl_dagster.tools.sql.views import RowsSource


async def evaluate(runtime: Runtime, visit: Visit, envelope: Envelope, scope: Scope) -> list[CheckOutcome]:
    """Evaluates every check of a step, in order. A check that cannot be evaluated has not passed.

    Args:
        scope: the names that templates of checks see, ``output`` among them.
    """
    checks, verdicts = visit.program.checks, {}
    for check, when in checks:
        if when is not None:
            verdicts[check.name] = await _holds(runtime, when, scope)
    ready_made = [check for check, when in checks if when is None]
    if ready_made:
        measured = await _measured(runtime, ready_made, envelope, visit.step)
        verdicts |= {check.name: answer for check, answer in zip(ready_made, measured, strict=True)}
    return [
        CheckOutcome(
            step=visit.step,
            visit=visit.number,
            name=check.name,
            passed=verdicts[check.name].passed,
            severity=check.severity.value,
            blocking=check.blocking,
            why=verdicts[check.name].why,
            facts=verdicts[check.name].facts,
        )
        for check, _ in checks
    ]


async def _holds(runtime: Runtime, when: Compiled, scope: Scope) -> CheckVerdict:
    try:
        if await with_references(runtime.results.get, when.holds, scope):
            return CheckVerdict(True)
        return CheckVerdict(False, f"{when.source} is false")
    except NoetlError as error:
        return CheckVerdict(False, str(error))


async def _measured(runtime: Runtime, checks: Sequence[CheckSpec], envelope: Envelope, step: str) -> list[CheckVerdict]:
    from noetl_dagster.tools.sql.quality import answers

    try:
        with tempfile.TemporaryDirectory(prefix="noetl-rows-") as folder:
            source = await _rows_of(runtime, envelope, step, Path(folder))
            return await answers(checks, source, runtime.settings)
    except (NoetlError, OSError) as error:
        return [CheckVerdict(False, str(error))] * len(checks)


async def _rows_of(runtime: Runtime, envelope: Envelope, step: str, folder: Path) -> RowsSource | None:
    """Returns the rows of a result: a list of mappings, a mapping that holds one under ``rows``, or a table.

    A loop's are the results of its items. None where there are no rows at all.

    Raises:
        NoRowsError: the result is something else.
    """
    from noetl_dagster.tools.sql.views import NoRowsError, source_of

    value: Any = envelope.get("ref")
    if value is None:
        value = envelope.get("data")
    if value is None and isinstance(envelope.get("results"), list):
        done = [one for one in envelope["results"] if one.get("status") == OK]
        value = [await runtime.results.get(one["ref"]) if "ref" in one else one.get("data") for one in done]
    elif isinstance(value, ResultRef) and "total" in envelope:  # a large loop's: errors stand as envelopes
        items = await runtime.results.get(value)
        value = [item for item in items if not _is_failure(item)] if isinstance(items, list) else items
    if isinstance(value, dict) and isinstance(value.get("rows"), list):
        value = value["rows"]
    if value is None or value == []:
        return None
    source = await source_of(value, runtime.results, step, folder)
    if source is None:
        raise NoRowsError(f"the result of {step} has no rows: a list of mappings, or a table, is needed")
    return source


def _is_failure(item: Any) -> bool:
    return isinstance(item, dict) and item.get("status") == ERROR and "error" in item


async def publish_parts(runtime: Runtime, visit: Visit, *, is_over: bool = True) -> None:
    """Publishes parts that a process that died, or a worker of the pool, left staged.

    Args:
        is_over: no command of the visit runs any more; what did not complete is discarded.

    Raises:
        ToolError: the sink cannot be reached, and staged parts stay staged. Or a part is missing.
    """
    sink = visit.program.sink
    if sink is None or not sink.is_staged:
        return
    await runtime.buffer.flush(visit.execution.id)
    records = await runtime.reads.fetch(SINK_PARTS, *visit.key)
    places = [PartPlace.model_validate(record["place"]) for record in records]
    await PartSinks(runtime.tool_context).publish_staged(places, part_prefix(*visit.key), is_over=is_over)
