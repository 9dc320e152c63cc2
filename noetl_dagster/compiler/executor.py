"""How the ops of a run are executed: on threads of the run's process, one by one in it, or in a process each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import (
    Executor,
    ExecutorDefinition,
    ExecutorRequirement,
    Field,
    InitExecutorContext,
    Int,
    Noneable,
    OpExecutionContext,
    Selector,
    executor,
    in_process_executor,
    multiprocess_executor,
)

from noetl_dagster.executors import threaded_executor
from noetl_dagster.executors.storages import settle

PROCESSES = "processes"

_CHOICES: dict[str, ExecutorDefinition] = {
    "threaded": threaded_executor,
    "in_process": in_process_executor,
    "multiprocess": multiprocess_executor,
}


def _with_processes(choice: ExecutorDefinition) -> Field:
    """The executor's own config with the number of processes beside it."""
    fields: dict[str, Any] = choice.config_schema.as_field().config_type.fields  # type: ignore[attr-defined]
    described = Field(
        Noneable(Int),
        default_value=None,
        description="The number of processes that work on a large loop or fan-out, the run's own included. "
        "By default NOETL_RUN_PROCESSES, which by default is the number of cores.",
    )
    return Field({**fields, PROCESSES: described})


def processes_of(run_config: Mapping[str, Any]) -> int | None:
    """How many processes a run is to have, where its config says."""
    chosen: Mapping[str, Any] = (run_config.get("execution") or {}).get("config") or {}
    return next((config.get(PROCESSES) for config in chosen.values() if config), None)


@executor(
    name="noetl",
    config_schema=Field(
        Selector({name: _with_processes(choice) for name, choice in _CHOICES.items()}),
        default_value={"threaded": {}},
    ),
    requirements=[ExecutorRequirement.PERSISTENT_OUTPUTS],
)
def noetl_executor(context: InitExecutorContext) -> Executor:
    """``threaded`` by default: branches run side by side, and an op costs what it costs in process, some 35 ms.

    In a process of its own it costs 900 ms.
    """
    given: dict[str, Any] = dict(context.executor_config)
    [(name, config)] = given.items()
    settle(context.instance)
    chosen = _CHOICES[name]
    own = {key: value for key, value in (config or {}).items() if key != PROCESSES}
    inner: Any = InitExecutorContext(
        job=context.job,
        executor_def=chosen,
        executor_config=own,  # type: ignore[call-overload]
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
