"""Settings of a step that are templates (``max_in_flight``, ``attempts``), rendered once when it is entered.

What they came to stands in ``step.enter``: who resumes the step, or runs its commands elsewhere, uses the same.
"""

from __future__ import annotations

from typing import Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import PlaybookError, TemplateError, ToolError
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram


async def settings_of(
    runtime: Runtime, execution: Execution, program: StepProgram, visit: int, entered: Event
) -> dict[str, Any]:
    """The settings of a visit, by where they stand in the step.

    Raises:
        TemplateError: one cannot be rendered.
        ToolError: one comes to something that may not stand there; says which, and what may.
    """
    step = program.step.name
    known = execution.state.settings.get((step, visit))
    if known is not None or not program.settings:
        return known or {}
    scope = execution.scope(ReferenceCache(), step, entered)
    settings = {}
    for name, template in program.settings.items():
        try:
            settings[name] = await render_async(compile_value(template), scope, runtime.results.get)
        except TemplateError as error:
            raise TemplateError(f"step {step}: {name} cannot be settled: {error}") from None
    try:
        execution.program.step_with(step, settings, execution.state.workload)
    except PlaybookError as error:
        wrong = "; ".join(str(problem) for problem in error.problems if problem.severity == "error")
        raise ToolError(wrong, kind="schema", code="SETTING") from None
    return settings
