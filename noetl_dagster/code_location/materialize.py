"""Runs a playbook in this process, for notebooks, tests and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster import (
    AssetCheckEvaluation,
    AssetKey,
    AssetMaterialization,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
)

from noetl_dagster.code_location.definitions import default_resource
from noetl_dagster.code_location.launch import launch, prepare
from noetl_dagster.compiler.names import NOETL
from noetl_dagster.engine.executions.lifecycle import admitted_workload
from noetl_dagster.engine.executions.overview import Overview, full_overview
from noetl_dagster.engine.executions.results import value_of
from noetl_dagster.errors import ExecutionFailedError, ExecutionNotFoundError, WorkloadError
from noetl_dagster.events.state import StepStatus
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.resources.engines import EngineProvider


@dataclass(frozen=True, slots=True)
class MaterializedPlaybook:
    """The outcome and the results of an execution of a playbook.

    Attributes:
        error: the reason if it did not complete.
        events: of its run in Dagster, in order.
    """

    playbook: Playbook
    execution_id: int
    run_id: str
    success: bool
    error: str | None
    events: Sequence[DagsterEvent]
    noetl: EngineProvider

    def asset_value(self, asset: str | Sequence[str] | AssetKey) -> Any:
        """Returns the result of a step: mappings, lists, numbers and text as they are, tables as Arrow, loops as lists.

        Args:
            asset: the step's name, or its asset's key.

        Raises:
            KeyError: no step of that name or key has completed.
        """
        step = self._step(asset)
        runtime = self.noetl.engine().runtime

        async def read() -> Any:
            execution = await runtime.load(self.execution_id)
            end = execution.state.latest.get(step)
            if end is None or end.status is not StepStatus.COMPLETED:
                raise KeyError(f"step {step} of execution {self.execution_id} has not completed")
            return await value_of(runtime, end.envelope)

        return self.noetl.run(read())

    def overview(self) -> Overview:
        """Returns steps, iterations, checks and their counts, as ``noetl-dagster status`` shows them."""
        return self.noetl.run(full_overview(self.noetl.engine().runtime, self.execution_id))

    @property
    def materializations(self) -> list[AssetMaterialization]:
        """Returns what was materialized, in order."""
        return [
            event.step_materialization_data.materialization
            for event in self.events
            if event.event_type is DagsterEventType.ASSET_MATERIALIZATION
        ]

    @property
    def check_evaluations(self) -> list[AssetCheckEvaluation]:
        """Returns the evaluations of the steps' checks."""
        return [
            event.asset_check_evaluation_data
            for event in self.events
            if event.event_type is DagsterEventType.ASSET_CHECK_EVALUATION
        ]

    def _step(self, asset: str | Sequence[str] | AssetKey) -> str:
        names = {step.name for step in self.playbook.steps}
        if isinstance(asset, str) and asset in names:
            return asset
        key = tuple(AssetKey.from_coercible(asset.split("/") if isinstance(asset, str) else asset).path)
        for name in sorted(names):
            if self.playbook.asset_key(name) == key:
                return name
        raise KeyError(f"playbook {self.playbook.name} makes no asset {asset!r}; its steps: {', '.join(sorted(names))}")


def materialize_playbook(
    playbook: Path | str | Playbook,
    workload: Mapping[str, Any] | None = None,
    *,
    partition: str | None = None,
    resources: Mapping[str, Any] | None = None,
    instance: DagsterInstance | None = None,
    tags: Mapping[str, str] | None = None,
    raise_on_error: bool = True,
) -> MaterializedPlaybook:
    """Runs a playbook as its Dagster job in this process and waits for its end.

    Args:
        playbook: a file, or a playbook that is loaded already.
        workload: keys that override the playbook's workload; dates and times become ISO 8601 text.
        partition: of a playbook with partitions: ``2026-01-31``, or ``day|place`` of two dimensions.
        resources: ``noetl`` instead of the engine that ``NOETL_*`` variables describe; others by name.
        instance: records the run; default: one that is discarded at the end. The event log keeps the execution in any
            case.
        tags: of the run.
        raise_on_error: raises an error if the execution does not complete.

    Raises:
        PlaybookError: the file has errors; the message lists all of them.
        WorkloadError: a value of ``workload`` or the partition does not fit the playbook.
        ExecutionFailedError: the execution has not completed.

    Examples:
        >>> made = materialize_playbook("playbooks/squares.yaml", {"numbers": [1, 2, 3]})
        >>> made.asset_value("total")
        14
    """
    loaded = playbook if isinstance(playbook, Playbook) else load_playbook(playbook)
    own_resources = dict(resources or {})
    noetl = own_resources.get(NOETL) or default_resource()
    try:
        values = admitted_workload(workload or {})
    except WorkloadError as reason:
        raise WorkloadError(f"{loaded.name}: {reason}") from reason
    engine = noetl.engine()
    prepared = prepare(loaded, noetl, own_resources)
    begun = engine.runtime.ids.next()
    with ExitStack() as stack:
        recorded = instance or stack.enter_context(DagsterInstance.ephemeral())
        ended = launch(
            prepared,
            noetl,
            recorded,
            execution_id=begun,
            workload=values,
            partition_key=partition,
            tags=dict(tags or {}),
        )
        events = [entry.dagster_event for entry in recorded.all_logs(ended.run_id) if entry.dagster_event]
    error = None
    if not ended.success:
        try:
            state = noetl.run(engine.runtime.load(begun)).state
            error = state.error or ended.error or f"it is {state.status}"
        except ExecutionNotFoundError:
            error = ended.error or "it did not begin"
    if raise_on_error and error is not None:
        raise ExecutionFailedError(f"{loaded.name}, execution {begun}: {error}")
    return MaterializedPlaybook(loaded, begun, ended.run_id, ended.success, error, events, noetl)
