"""How the ops of a run are executed: on threads of the run's process, one by one in it, or in a process each."""

from __future__ import annotations

from typing import Any

from dagster import (
    Executor,
    ExecutorDefinition,
    ExecutorRequirement,
    Field,
    InitExecutorContext,
    OpExecutionContext,
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


def runs_in_one_process(context: OpExecutionContext) -> bool:
    """Whether the ops of a run share this process, so that what one starts is there for the next."""
    name = context.job_def.executor_def.name
    if name != noetl_executor.name:
        return name in (threaded_executor.name, in_process_executor.name)
    config: dict[str, Any] = dict(context.run.run_config)
    for key in ("execution", "config"):
        config = config.get(key) or {}
    return "multiprocess" not in config
