"""How the ops of a run are executed: on threads of the run's process, one by one in it, or in a process each."""

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

from noetl_dagster.executors import threaded_executor

_CHOICES: dict[str, ExecutorDefinition] = {
    "threaded": threaded_executor,
    "in_process": in_process_executor,
    "multiprocess": multiprocess_executor,
}


@executor(
    name="noetl",
    config_schema=Field(
        Selector({name: choice.config_schema.as_field() for name, choice in _CHOICES.items()}),
        default_value={"threaded": {}},
    ),
    requirements=[ExecutorRequirement.PERSISTENT_OUTPUTS],
)
def noetl_executor(context: InitExecutorContext) -> Executor:
    """``threaded`` by default: branches run side by side, and an op costs what it costs in process, some 35 ms.

    In a process of its own it costs 900 ms.
    """
    [(name, config)] = context.executor_config.items()
    chosen = _CHOICES[name]
    inner: Any = InitExecutorContext(
        job=context.job,
        executor_def=chosen,
        executor_config=dict(config or {}),  # type: ignore[call-overload]
        instance=context.instance,
    )
    return chosen.executor_creation_fn(inner)  # type: ignore[misc]
