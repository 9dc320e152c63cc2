"""How the ops of a run are executed: in the run's own process, or in a process each."""

from __future__ import annotations

from typing import Any

from dagster import (
    Executor,
    ExecutorDefinition,
    ExecutorRequirement,
    Field,
    InitExecutorContext,
    Selector,
    executor,
    in_process_executor,
    multiprocess_executor,
)

_CHOICES: dict[str, ExecutorDefinition] = {
    "in_process": in_process_executor,
    "multiprocess": multiprocess_executor,
}


@executor(
    name="noetl",
    config_schema=Field(
        Selector({name: choice.config_schema.as_field() for name, choice in _CHOICES.items()}),
        default_value={"in_process": {}},
    ),
    requirements=[ExecutorRequirement.PERSISTENT_OUTPUTS],
)
def noetl_executor(context: InitExecutorContext) -> Executor:
    """``in_process`` by default, since one op costs 35 ms there and 900 ms in a process of its own."""
    [(name, config)] = context.executor_config.items()
    chosen = _CHOICES[name]
    inner: Any = InitExecutorContext(
        job=context.job,
        executor_def=chosen,
        executor_config=dict(config or {}),  # type: ignore[call-overload]
        instance=context.instance,
    )
    return chosen.executor_creation_fn(inner)  # type: ignore[misc]
