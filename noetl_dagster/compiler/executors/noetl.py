"""The executor of playbook jobs: threads of the run's process, in process, one process or one pod for each step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dagster import (
    DagsterInvalidConfigError,
    DagsterInvariantViolationError,
    Executor,
    ExecutorDefinition,
    ExecutorRequirement,
    Field,
    InitExecutorContext,
    Int,
    Noneable,
    OpExecutionContext,
    Permissive,
    Selector,
    executor,
    in_process_executor,
    multiprocess_executor,
)

from noetl_dagster.compiler.executors import threaded_executor
from noetl_dagster.compiler.executors.storages import keep_connections
from noetl_dagster.compiler.executors.threaded import PROCESSES, check_numbers
from noetl_dagster.compiler.names import POD_TAG
from noetl_dagster.extras import needs_extra

THREADED = "threaded"
KUBERNETES = "kubernetes"
STEP_OF_POD = "DAGSTER_RUN_STEP_KEY"
"""Variable that ``dagster-k8s`` sets in a step's pod."""

_CHOICES: dict[str, ExecutorDefinition] = {
    THREADED: threaded_executor,
    "in_process": in_process_executor,
    "multiprocess": multiprocess_executor,
}


_PROCESSES = Field(
    Noneable(Int),
    default_value=None,
    description="The number of processes that work on a large loop or fan-out, the run's own included. "
    "By default NOETL_RUN_PROCESSES, which by default is the number of cores.",
)
_FIELDS: dict[str, Any] = {
    name: Field({**choice.config_schema.as_field().config_type.fields, PROCESSES: _PROCESSES})  # type: ignore[attr-defined]
    for name, choice in _CHOICES.items()
}
# k8s_job_executor reads its config when a run chooses it: dagster-k8s is an extra
_FIELDS[KUBERNETES] = Field(
    Permissive({PROCESSES: Field(Noneable(Int), default_value=None)}),
    description="Each op in a pod of its own, with the config of dagster-k8s' k8s_job_executor: "
    "max_concurrent, job_namespace, step_k8s_config and so on. Pods are otherwise as the run launcher makes them.",
)


def _k8s_job_executor(config: Mapping[str, Any]) -> tuple[ExecutorDefinition, dict[str, Any]]:
    """Returns the executor for pods, and its config with the defaults.

    Raises:
        DagsterInvalidConfigError: the config is none of that executor's.
        DagsterInvariantViolationError: ``dagster-k8s`` is not installed.
    """
    try:
        from dagster_k8s import k8s_job_executor
    except ImportError as error:
        raise DagsterInvariantViolationError(needs_extra("execution: config: kubernetes", "k8s")) from error
    read = k8s_job_executor.configured(dict(config), KUBERNETES).apply_config_mapping({})
    if not read.success:
        raise DagsterInvalidConfigError("execution: config: kubernetes", read.errors, dict(config))
    return k8s_job_executor, dict(read.value["config"])  # type: ignore[index,call-overload]


def processes_of(run_config: Mapping[str, Any]) -> int | None:
    """Returns the number of processes of a run, if its config sets it."""
    return next((config.get(PROCESSES) for config in _chosen(run_config).values() if config), None)


def _chosen(run_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of a run's executor, by the executor's name."""
    return (run_config.get("execution") or {}).get("config") or {}


@executor(
    name="noetl",
    config_schema=Field(Selector(_FIELDS), default_value={THREADED: {}}),
    requirements=[ExecutorRequirement.PERSISTENT_OUTPUTS],
)
def noetl_executor(context: InitExecutorContext) -> Executor:
    """``threaded`` by default: branches run side by side, and an op costs as much as in process, some 35 ms.

    In a process of its own it costs 900 ms.
    """
    choice: dict[str, Any] = dict(context.executor_config)
    [(name, config)] = choice.items()
    if name == THREADED and _steps_with_pods(context):
        name, config = KUBERNETES, {"enable_owner_references": context.instance.run_launcher.load_incluster_config}  # type: ignore[attr-defined]
    keep_connections(context.instance)
    check_numbers(name, config or {})
    own = {key: value for key, value in (config or {}).items() if key != PROCESSES}
    chosen, own = _k8s_job_executor(own) if name == KUBERNETES else (_CHOICES[name], own)
    inner: Any = InitExecutorContext(
        job=context.job,
        executor_def=chosen,
        executor_config=own,  # type: ignore[call-overload]
        instance=context.instance,
    )
    return chosen.executor_creation_fn(inner)  # type: ignore[misc,return-value]


def _steps_with_pods(context: InitExecutorContext) -> bool:
    """Reports whether one of the job's ops asks for a pod of its own, and runs are launched on Kubernetes.

    The launcher is made only for such jobs: it reads the service account's token, which other runs do not have.
    """
    if not any(POD_TAG in node.tags for node in context.job.get_definition().all_node_defs):
        return False
    return any(one.__name__ == "K8sRunLauncher" for one in type(context.instance.run_launcher).__mro__)


def runs_in_one_process(context: OpExecutionContext) -> bool:
    """Returns True if the ops of a run share this process, so that later ops find what earlier ones started."""
    name = context.job_def.executor_def.name
    if name != noetl_executor.name:
        return name in (threaded_executor.name, in_process_executor.name)
    apart = {"multiprocess", KUBERNETES} & set(_chosen(context.run.run_config))
    return not apart and STEP_OF_POD not in os.environ
