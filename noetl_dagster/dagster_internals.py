"""Dagster's private names: the only module that imports them, with the use and the replacement of each.

A name is loaded when it is first asked for. If an upgrade has moved it, the error names its users and the replacement.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster._cli.api import _execute_run_command_body
    from dagster._config import process_config
    from dagster._core.definitions.dependency import DynamicCollectDependencyDefinition
    from dagster._core.definitions.job_base import InMemoryJob
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
    from dagster._core.event_api import EventLogCursor
    from dagster._core.events import ASSET_CHECK_EVENTS, ASSET_EVENTS, EngineEventData, StepMaterializationData
    from dagster._core.execution.api import ExecuteRunWithPlanIterable, create_execution_plan, job_execution_iterator
    from dagster._core.execution.compute_logs import create_compute_log_file_key, redirect_to_file
    from dagster._core.execution.context_creation_job import (
        PlanExecutionContextManager,
        PlanOrchestrationContextManager,
        orchestration_context_event_generator,
    )
    from dagster._core.execution.plan.execute_plan import (
        _handle_compute_log_setup_error,
        _handle_compute_log_teardown_error,
        _trigger_hook,
        dagster_event_sequence_for_step,
    )
    from dagster._core.execution.plan.instance_concurrency_context import InstanceConcurrencyContext
    from dagster._core.execution.plan.objects import StepFailureData, StepRetryData
    from dagster._core.execution.retries import RetryMode
    from dagster._core.execution.step_dependency_config import StepDependencyConfig
    from dagster._core.executor.step_delegating import StepHandlerContext
    from dagster._core.instance.ref import InstanceRef
    from dagster._core.launcher.base import CheckRunHealthResult, LaunchRunContext, WorkerStatus
    from dagster._core.remote_origin import (
        ManagedGrpcPythonEnvCodeLocationOrigin,
        RemoteJobOrigin,
        RemoteRepositoryOrigin,
    )
    from dagster._core.storage.cloud_storage_compute_log_manager import (
        CloudStorageComputeLogManager,
        PollingComputeLogSubscriptionManager,
    )
    from dagster._core.storage.compute_log_manager import (
        CapturedLogContext,
        CapturedLogSubscription,
        ComputeIOType,
    )
    from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager
    from dagster._core.storage.upath_io_manager import escape_dotdot_segments, escape_leading_slash
    from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster._grpc.types import ExecuteStepArgs
    from dagster._serdes import ConfigurableClass, ConfigurableClassData, deserialize_value, serialize_value
    from dagster._utils.error import serializable_error_info_from_exc_info
    from dagster._utils.interrupts import capture_interrupts
    from dagster_shared.error import SerializableErrorInfo


@dataclass(frozen=True, slots=True)
class Internal:
    """A private name of Dagster.

    Attributes:
        module: that contains it in the versions that pyproject.toml allows.
        use: the modules that need it, and for what.
        instead: the replacement if it is gone.
    """

    module: str
    use: str
    instead: str


_PRIVATE = {
    (
        "compiler/executors/noetl.py: the config of an executor that is imported when a run chooses it",
        "import dagster-k8s always, and the executor's own schema",
    ): {"dagster._config": "process_config"},
    (
        "compiler/job.py: joins the groups of a fan-out in a graph that is made of definitions",
        "collect() of dynamic outputs inside a @graph function that wires the same ops",
    ): {"dagster._core.definitions.dependency": "DynamicCollectDependencyDefinition"},
    (
        "compiler/job.py and code_location/python_assets.py: the type of what define_asset_job returns",
        "type(define_asset_job('any'))",
    ): {"dagster._core.definitions.unresolved_asset_job_definition": "UnresolvedAssetJobDefinition"},
    (
        "compiler/executors/threaded.py: the steps of a plan, its resources, pools and hooks",
        "the bodies of InProcessExecutor.execute and inner_plan_execution_iterator, whose loop runs on threads here",
    ): {
        "dagster._core.events": "EngineEventData",
        "dagster._core.execution.api": "ExecuteRunWithPlanIterable",
        "dagster._core.execution.compute_logs": "create_compute_log_file_key",
        "dagster._core.execution.context_creation_job": "PlanExecutionContextManager",
        "dagster._core.execution.plan.execute_plan": "_handle_compute_log_setup_error "
        "_handle_compute_log_teardown_error _trigger_hook dagster_event_sequence_for_step",
        "dagster._core.execution.plan.instance_concurrency_context": "InstanceConcurrencyContext",
        "dagster._core.execution.retries": "RetryMode",
        "dagster._core.execution.step_dependency_config": "StepDependencyConfig",
    },
    (
        "compiler/reporting.py: the assets of many executions without runs, stored together",
        "DagsterInstance.report_runless_asset_event for each",
    ): {"dagster._core.events": "StepMaterializationData"},
    (
        "compiler/executors/storages.py: events are stored with one statement",
        "PostgresEventLogStorage.store_event, whose statements it has without those of SQLAlchemy",
    ): {"dagster._core.events": "ASSET_CHECK_EVENTS ASSET_EVENTS"},
    (
        "compiler/executors/pods.py: the pods of steps",
        "k8s_job_executor for the whole run, which launches and watches pods by itself",
    ): {
        "dagster._core.event_api": "EventLogCursor",
        "dagster._core.execution.plan.objects": "StepFailureData StepRetryData",
        "dagster._core.executor.step_delegating": "StepHandlerContext",
        "dagster._grpc.types": "ExecuteStepArgs",
    },
    ("compiler/executors/pods.py: errors as events", "str(error)"): {
        "dagster._utils.error": "serializable_error_info_from_exc_info",
        "dagster_shared.error": "SerializableErrorInfo",
    },
    (
        "code_location/launch.py: runs a job made from a playbook, with an id and tags that are known before",
        "execute_run, which plans each run a second time, or JobDefinition.execute_in_process(run_id=..., tags=...)",
    ): {
        "dagster._core.definitions.job_base": "InMemoryJob",
        "dagster._core.execution.api": "create_execution_plan job_execution_iterator",
        "dagster._core.execution.context_creation_job": "PlanOrchestrationContextManager "
        "orchestration_context_event_generator",
    },
    (
        "code_location/launch.py: names the job of a run, so that the UI can launch the run again",
        "leave remote_job_origin out of create_run_for_job; the UI then cannot re-execute the run",
    ): {
        "dagster._core.remote_origin": "ManagedGrpcPythonEnvCodeLocationOrigin RemoteJobOrigin RemoteRepositoryOrigin",
        "dagster._core.types.loadable_target_origin": "LoadableTargetOrigin",
    },
    (
        "io_managers/assets.py: partition keys as file names, just as UPathIOManager makes them",
        "%2F for a leading slash and %2E%2E for segments '..', written there: stored results keep their keys",
    ): {"dagster._core.storage.upath_io_manager": "escape_dotdot_segments escape_leading_slash"},
    ("launcher/driver.py: executes a launched run", "the command dagster api execute_run"): {
        "dagster._cli.api": "_execute_run_command_body"
    },
    ("launcher/driver.py: a run that is interrupted reports it", "signal.signal"): {
        "dagster._utils.interrupts": "capture_interrupts"
    },
    ("launcher/: the instance of a launched run", "DagsterInstance.get()"): {
        "dagster._core.instance.ref": "InstanceRef",
        "dagster._serdes": "deserialize_value serialize_value",
    },
    ("launcher/warm.py: the interface of launchers, with run monitoring", "dagster._core.launcher"): {
        "dagster._core.launcher.base": "CheckRunHealthResult LaunchRunContext WorkerStatus",
    },
    (
        "launcher/workspace.py: the jobs of a workspace's code locations",
        "launchRun of the webserver's GraphQL API",
    ): {
        "dagster._core.workspace.context": "WorkspaceProcessContext",
        "dagster._core.workspace.load_target": "WorkspaceFileTarget",
    },
    (
        "launcher/compute_logs.py: compute logs without processes that copy them",
        "no compute_logs in dagster.yaml; os.dup2 of an opened file",
    ): {
        "dagster._core.execution.compute_logs": "redirect_to_file",
        "dagster._core.storage.compute_log_manager": "CapturedLogContext ComputeIOType",
        "dagster._core.storage.local_compute_log_manager": "LocalComputeLogManager",
    },
    (
        "launcher/stored_logs.py: compute logs in the object store",
        "S3ComputeLogManager of dagster-aws or GCSComputeLogManager of dagster-gcp as they are",
    ): {
        "dagster._core.storage.cloud_storage_compute_log_manager": "CloudStorageComputeLogManager "
        "PollingComputeLogSubscriptionManager",
        "dagster._core.storage.compute_log_manager": "CapturedLogSubscription",
        "dagster._serdes": "ConfigurableClass",
    },
    (
        "launcher/ and compiler/executors/storages.py: the type of a class's section of dagster.yaml",
        "typing.Any",
    ): {"dagster._serdes": "ConfigurableClassData"},
}
"""The names by module, for each use and its replacement."""

INTERNALS = {
    name: Internal(module, use, instead)
    for (use, instead), modules in _PRIVATE.items()
    for module, names in modules.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Loads one of :data:`INTERNALS`.

    Raises:
        ImportError: this version of Dagster does not have it there; the message has its use and its replacement.
    """
    internal = INTERNALS.get(name)
    if internal is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(internal.module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"Dagster no longer has {internal.module}.{name} ({error}). Needed by {internal.use}. "
            f"Look where it went; else use {internal.instead}."
        ) from error
    globals()[name] = found
    return found
