"""Dagster's private modules: the only place that imports them, and what each is needed for.

A name is loaded when it is first asked for. Where an upgrade has moved it, the error says who needs it and
what to use instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster._cli.api import _execute_run_command_body as _execute_run_command_body
    from dagster._config import process_config as process_config
    from dagster._core.definitions.dependency import (
        DynamicCollectDependencyDefinition as DynamicCollectDependencyDefinition,
    )
    from dagster._core.definitions.job_base import InMemoryJob as InMemoryJob
    from dagster._core.definitions.unresolved_asset_job_definition import (
        UnresolvedAssetJobDefinition as UnresolvedAssetJobDefinition,
    )
    from dagster._core.event_api import EventLogCursor as EventLogCursor
    from dagster._core.events import EngineEventData as EngineEventData
    from dagster._core.execution.api import ExecuteRunWithPlanIterable as ExecuteRunWithPlanIterable
    from dagster._core.execution.api import execute_run as execute_run
    from dagster._core.execution.compute_logs import (
        create_compute_log_file_key as create_compute_log_file_key,
    )
    from dagster._core.execution.compute_logs import redirect_to_file as redirect_to_file
    from dagster._core.execution.context_creation_job import (
        PlanExecutionContextManager as PlanExecutionContextManager,
    )
    from dagster._core.execution.plan.execute_plan import _trigger_hook as _trigger_hook
    from dagster._core.execution.plan.execute_plan import (
        dagster_event_sequence_for_step as dagster_event_sequence_for_step,
    )
    from dagster._core.execution.plan.instance_concurrency_context import (
        InstanceConcurrencyContext as InstanceConcurrencyContext,
    )
    from dagster._core.execution.plan.objects import StepFailureData as StepFailureData
    from dagster._core.execution.plan.objects import StepRetryData as StepRetryData
    from dagster._core.execution.retries import RetryMode as RetryMode
    from dagster._core.execution.retries import get_retries_config as get_retries_config
    from dagster._core.execution.step_dependency_config import StepDependencyConfig as StepDependencyConfig
    from dagster._core.execution.step_dependency_config import (
        get_step_dependency_config_field as get_step_dependency_config_field,
    )
    from dagster._core.execution.tags import (
        get_tag_concurrency_limits_config as get_tag_concurrency_limits_config,
    )
    from dagster._core.executor.step_delegating import StepHandlerContext as StepHandlerContext
    from dagster._core.instance.ref import InstanceRef as InstanceRef
    from dagster._core.launcher.base import CheckRunHealthResult as CheckRunHealthResult
    from dagster._core.launcher.base import LaunchRunContext as LaunchRunContext
    from dagster._core.launcher.base import WorkerStatus as WorkerStatus
    from dagster._core.remote_origin import (
        ManagedGrpcPythonEnvCodeLocationOrigin as ManagedGrpcPythonEnvCodeLocationOrigin,
    )
    from dagster._core.remote_origin import RemoteJobOrigin as RemoteJobOrigin
    from dagster._core.remote_origin import RemoteRepositoryOrigin as RemoteRepositoryOrigin
    from dagster._core.storage.cloud_storage_compute_log_manager import (
        CloudStorageComputeLogManager as CloudStorageComputeLogManager,
    )
    from dagster._core.storage.cloud_storage_compute_log_manager import (
        PollingComputeLogSubscriptionManager as PollingComputeLogSubscriptionManager,
    )
    from dagster._core.storage.compute_log_manager import CapturedLogContext as CapturedLogContext
    from dagster._core.storage.compute_log_manager import CapturedLogMetadata as CapturedLogMetadata
    from dagster._core.storage.compute_log_manager import CapturedLogSubscription as CapturedLogSubscription
    from dagster._core.storage.compute_log_manager import ComputeIOType as ComputeIOType
    from dagster._core.storage.local_compute_log_manager import (
        LocalComputeLogManager as LocalComputeLogManager,
    )
    from dagster._core.storage.upath_io_manager import escape_dotdot_segments as escape_dotdot_segments
    from dagster._core.storage.upath_io_manager import escape_leading_slash as escape_leading_slash
    from dagster._core.types.loadable_target_origin import LoadableTargetOrigin as LoadableTargetOrigin
    from dagster._core.workspace.context import WorkspaceProcessContext as WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget as WorkspaceFileTarget
    from dagster._grpc.types import ExecuteStepArgs as ExecuteStepArgs
    from dagster._serdes import ConfigurableClass as ConfigurableClass
    from dagster._serdes import ConfigurableClassData as ConfigurableClassData
    from dagster._serdes import deserialize_value as deserialize_value
    from dagster._serdes import serialize_value as serialize_value
    from dagster._utils.error import (
        serializable_error_info_from_exc_info as serializable_error_info_from_exc_info,
    )
    from dagster._utils.interrupts import capture_interrupts as capture_interrupts
    from dagster_shared.error import SerializableErrorInfo as SerializableErrorInfo


@dataclass(frozen=True, slots=True)
class Internal:
    """A private name of Dagster.

    Attributes:
        module: where it stands in the versions that pyproject.toml allows.
        use: who needs it, and what for.
        instead: what to use when it is gone.
    """

    module: str
    use: str
    instead: str


_ORIGIN_USE = "code_location/launch.py: names the job of a run, so that the UI can launch the run again"
_ORIGIN_INSTEAD = "leave remote_job_origin out of create_run_for_job; the UI then cannot re-execute the run"
_ESCAPE_USE = "io_managers/assets.py: partition keys as file names, just as UPathIOManager makes them"
_ESCAPE_INSTEAD = (
    "%2F for a leading slash and %2E%2E for segments '..', written there: stored results keep their keys"
)

_LAUNCHER = "launcher/: "
_STORED = "launcher/stored_logs.py: compute logs in the object store"

_EXECUTOR = "executors/threaded.py: "
_PODS = "executors/pods.py: "
_STEP_HANDLER = "k8s_job_executor for the whole run, which launches and watches pods by itself"

INTERNALS = {
    "process_config": Internal(
        "dagster._config",
        "compiler/executors/noetl.py: the config of an executor that is imported when a run chooses it",
        "import dagster-k8s always, and the executor's own schema",
    ),
    "DynamicCollectDependencyDefinition": Internal(
        "dagster._core.definitions.dependency",
        "compiler/graph.py: joins the groups of a fan-out in a graph that is made of definitions",
        "collect() of dynamic outputs inside a @graph function that wires the same ops",
    ),
    "InMemoryJob": Internal(
        "dagster._core.definitions.job_base",
        "code_location/launch.py: a job made from a playbook, run in this process",
        "JobDefinition.execute_in_process(instance=...), which chooses the run's id itself",
    ),
    "UnresolvedAssetJobDefinition": Internal(
        "dagster._core.definitions.unresolved_asset_job_definition",
        "compiler/job.py and code_location/python_assets.py: the type of what define_asset_job gives",
        "type(define_asset_job('any'))",
    ),
    "execute_run": Internal(
        "dagster._core.execution.api",
        "code_location/launch.py: executes a run whose id and tags are known before it starts",
        "JobDefinition.execute_in_process(run_id=..., instance=..., tags=...)",
    ),
    "ManagedGrpcPythonEnvCodeLocationOrigin": Internal(
        "dagster._core.remote_origin", _ORIGIN_USE, _ORIGIN_INSTEAD
    ),
    "RemoteJobOrigin": Internal("dagster._core.remote_origin", _ORIGIN_USE, _ORIGIN_INSTEAD),
    "RemoteRepositoryOrigin": Internal("dagster._core.remote_origin", _ORIGIN_USE, _ORIGIN_INSTEAD),
    "escape_dotdot_segments": Internal(
        "dagster._core.storage.upath_io_manager", _ESCAPE_USE, _ESCAPE_INSTEAD
    ),
    "escape_leading_slash": Internal("dagster._core.storage.upath_io_manager", _ESCAPE_USE, _ESCAPE_INSTEAD),
    "LoadableTargetOrigin": Internal(
        "dagster._core.types.loadable_target_origin", _ORIGIN_USE, _ORIGIN_INSTEAD
    ),
    "EngineEventData": Internal(
        "dagster._core.events",
        _EXECUTOR + "what the events of the run say of the process",
        "DagsterEvent.engine_event without it",
    ),
    "ExecuteRunWithPlanIterable": Internal(
        "dagster._core.execution.api",
        _EXECUTOR + "resources around the steps of a plan",
        "the body of InProcessExecutor.execute",
    ),
    "InstanceConcurrencyContext": Internal(
        "dagster._core.execution.plan.instance_concurrency_context",
        _EXECUTOR + "slots of pools",
        "the body of InProcessExecutor.execute",
    ),
    "PlanExecutionContextManager": Internal(
        "dagster._core.execution.context_creation_job",
        _EXECUTOR + "resources around the steps of a plan",
        "the body of InProcessExecutor.execute",
    ),
    "EventLogCursor": Internal(
        "dagster._core.event_api",
        _PODS + "reads on in the log of a run",
        "the cursor that the connection gives",
    ),
    "ExecuteStepArgs": Internal("dagster._grpc.types", _PODS + "the command of a step's pod", _STEP_HANDLER),
    "SerializableErrorInfo": Internal(
        "dagster_shared.error", _PODS + "why a pod was lost, as an event", "str(error)"
    ),
    "StepFailureData": Internal(
        "dagster._core.execution.plan.objects",
        _PODS + "the failure of a step whose pod was lost",
        _STEP_HANDLER,
    ),
    "StepHandlerContext": Internal(
        "dagster._core.executor.step_delegating",
        _PODS + "what K8sStepHandler is told of a step",
        _STEP_HANDLER,
    ),
    "StepRetryData": Internal(
        "dagster._core.execution.plan.objects",
        _PODS + "a step whose pod was lost is tried again",
        _STEP_HANDLER,
    ),
    "RetryMode": Internal(
        "dagster._core.execution.retries",
        _EXECUTOR + "whether steps are tried again",
        "the constructor of InProcessExecutor",
    ),
    "StepDependencyConfig": Internal(
        "dagster._core.execution.step_dependency_config",
        _EXECUTOR + "when a step is ready",
        "the constructor of InProcessExecutor",
    ),
    "create_compute_log_file_key": Internal(
        "dagster._core.execution.compute_logs",
        _EXECUTOR + "the name of the file of compute logs",
        "str(uuid.uuid4())",
    ),
    "dagster_event_sequence_for_step": Internal(
        "dagster._core.execution.plan.execute_plan",
        _EXECUTOR + "runs one step",
        "inner_plan_execution_iterator, whose loop this executor runs on threads",
    ),
    "_trigger_hook": Internal(
        "dagster._core.execution.plan.execute_plan",
        _EXECUTOR + "runs the hooks of a step",
        "inner_plan_execution_iterator, whose loop this executor runs on threads",
    ),
    "get_retries_config": Internal(
        "dagster._core.execution.retries",
        _EXECUTOR + "the schema of its config",
        "the schema of in_process_executor",
    ),
    "get_step_dependency_config_field": Internal(
        "dagster._core.execution.step_dependency_config",
        _EXECUTOR + "the schema of its config",
        "the schema of in_process_executor",
    ),
    "get_tag_concurrency_limits_config": Internal(
        "dagster._core.execution.tags",
        _EXECUTOR + "the schema of its config",
        "the schema of multiprocess_executor",
    ),
    "_execute_run_command_body": Internal(
        "dagster._cli.api", _LAUNCHER + "executes a launched run", "the command dagster api execute_run"
    ),
    "WorkspaceProcessContext": Internal(
        "dagster._core.workspace.context",
        _LAUNCHER + "the jobs of a workspace's code locations",
        "launchRun of the webserver's GraphQL API",
    ),
    "WorkspaceFileTarget": Internal(
        "dagster._core.workspace.load_target",
        _LAUNCHER + "the jobs of a workspace's code locations",
        "launchRun of the webserver's GraphQL API",
    ),
    "redirect_to_file": Internal(
        "dagster._core.execution.compute_logs",
        _LAUNCHER + "compute logs without processes that copy them",
        "os.dup2 of an opened file",
    ),
    "InstanceRef": Internal(
        "dagster._core.instance.ref", _LAUNCHER + "the instance of a launched run", "DagsterInstance.get()"
    ),
    "CheckRunHealthResult": Internal(
        "dagster._core.launcher.base", _LAUNCHER + "answers run monitoring", "dagster._core.launcher"
    ),
    "LaunchRunContext": Internal(
        "dagster._core.launcher.base", _LAUNCHER + "what a launcher is given", "typing.Any"
    ),
    "WorkerStatus": Internal(
        "dagster._core.launcher.base", _LAUNCHER + "answers run monitoring", "dagster._core.launcher"
    ),
    "CloudStorageComputeLogManager": Internal(
        "dagster._core.storage.cloud_storage_compute_log_manager",
        _STORED,
        "S3ComputeLogManager of dagster-aws as it is",
    ),
    "PollingComputeLogSubscriptionManager": Internal(
        "dagster._core.storage.cloud_storage_compute_log_manager",
        _STORED,
        "GCSComputeLogManager of dagster-gcp",
    ),
    "CapturedLogContext": Internal(
        "dagster._core.storage.compute_log_manager",
        _LAUNCHER + "compute logs without processes that copy them",
        "LocalComputeLogManager as it is",
    ),
    "CapturedLogMetadata": Internal(
        "dagster._core.storage.compute_log_manager", _STORED, "S3ComputeLogManager of dagster-aws as it is"
    ),
    "CapturedLogSubscription": Internal(
        "dagster._core.storage.compute_log_manager", _STORED, "S3ComputeLogManager of dagster-aws as it is"
    ),
    "ComputeIOType": Internal(
        "dagster._core.storage.compute_log_manager",
        _LAUNCHER + "compute logs without processes that copy them",
        "LocalComputeLogManager as it is",
    ),
    "LocalComputeLogManager": Internal(
        "dagster._core.storage.local_compute_log_manager",
        _LAUNCHER + "compute logs without processes that copy them",
        "no compute_logs in dagster.yaml",
    ),
    "ConfigurableClass": Internal("dagster._serdes", _STORED, "S3ComputeLogManager of dagster-aws as it is"),
    "ConfigurableClassData": Internal(
        "dagster._serdes", _LAUNCHER + "the type of what dagster.yaml says of a class", "typing.Any"
    ),
    "deserialize_value": Internal(
        "dagster._serdes", _LAUNCHER + "the instance of a launched run", "DagsterInstance.get()"
    ),
    "serialize_value": Internal(
        "dagster._serdes", _LAUNCHER + "the instance of a launched run", "DagsterInstance.get()"
    ),
    "capture_interrupts": Internal(
        "dagster._utils.interrupts", _LAUNCHER + "a run that is interrupted says so", "signal.signal"
    ),
    "serializable_error_info_from_exc_info": Internal(
        "dagster._utils.error", _EXECUTOR + "an error as an event", "str(error)"
    ),
}


def __getattr__(name: str) -> Any:
    """Loads one of :data:`INTERNALS`.

    Raises:
        ImportError: this version of Dagster has it elsewhere, or nowhere; says who needs it and the way out.
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
