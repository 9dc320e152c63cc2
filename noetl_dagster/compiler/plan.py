"""The plan of a playbook: everything from which its Dagster definitions are built, derived once.

``ops``, ``job`` and the ops at run time only read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dagster import AssetCheckSpec, AssetKey, AssetSpec

from noetl_dagster.compiler.lineage.tables import PlaybookWriters, Writers
from noetl_dagster.compiler.names import dagster_name, tag_key, unique_names
from noetl_dagster.compiler.partitions import AssetReading, PartitionsByAsset, PlaybookPartitions, readings_of
from noetl_dagster.compiler.specs import asset_spec, check_specs, condition_of
from noetl_dagster.engine.executions.spark_ahead import uses_spark
from noetl_dagster.playbook.graph import Region, StepGraph
from noetl_dagster.playbook.models import Playbook, Step

PLAYBOOK_TAG = "noetl/playbook"
"""Run tag: ``metadata.path`` of the playbook."""

RESULT = "result"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step that can be reached.

    Attributes:
        name: Dagster's name of the step, unique in the playbook.
        result: output of the step's op that carries its result.
        spec: Dagster's description of its asset; None for a step that is no asset.
        checks: of its asset, in the order of the playbook.
    """

    step: Step
    name: str
    result: str
    key: AssetKey
    spec: AssetSpec | None
    checks: tuple[AssetCheckSpec, ...]

    @property
    def arc(self) -> str:
        """The op output that stands for the arcs to this step."""
        return f"to_{self.name}"

    @property
    def output(self) -> str:
        """The graph output that carries the step's result."""
        return f"{RESULT}__{self.name}"

    def check_output(self, check: str) -> str:
        """Returns the op output of a check."""
        return f"check__{self.name}__{check}"


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """One step, or the steps that one op walks together.

    Attributes:
        op: name of its op in the graph; of a fan-out the first of three.
        targets: the steps outside to which its arcs lead.
        readings: the assets outside of the playbook that its steps read.
        starts: the execution starts here.
        has_arcs: arcs from other regions lead here.
        needs_spark: one of its steps uses Spark, or a step that its arcs may lead to; the session starts ahead.
    """

    region: Region
    op: str
    steps: tuple[StepPlan, ...]
    targets: tuple[StepPlan, ...]
    readings: tuple[AssetReading, ...]
    starts: bool
    has_arcs: bool
    needs_spark: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The steps by the names that the playbook gives them."""
        return self.region.steps

    @property
    def is_fanout(self) -> bool:
        """True if the region is one step whose shards are dynamic outputs."""
        return not self.region.is_joint and self.steps[0].step.is_fanout

    @property
    def group_op(self) -> str:
        """Name of the op that runs one group of shards."""
        return f"{self.op}_group"

    @property
    def routing_op(self) -> str:
        """Name of the op that has the region's results and arcs."""
        return f"{self.op}_fanin" if self.is_fanout else self.op

    @property
    def assets(self) -> Iterator[StepPlan]:
        """The steps whose results are assets."""
        return (one for one in self.steps if one.spec is not None)

    @property
    def pool(self) -> str | None:
        """The pool of Dagster whose slots its ops take."""
        return next((one.step.dagster_pool for one in self.steps if one.step.dagster_pool), None)


@dataclass(frozen=True, slots=True)
class PlaybookPlan:
    """One playbook as Dagster sees it.

    Attributes:
        name: of its job.
        graph_name: of its graph, under which run config holds the workload.
        tags: of its runs.
        partitions: of all its assets.
        steps: the steps that can be reached, in playbook order. Dagster would run the others at once.
        regions: the regions of these steps, in topological order.
        readings: the assets outside of the playbook that its steps read; each is an input of the graph.
        upstream: the assets that each step's asset depends on, by graph output.
        writers: the assets whose steps write a table.
    """

    playbook: Playbook
    name: str
    graph_name: str
    tags: Mapping[str, str]
    partitions: PlaybookPartitions
    steps: tuple[StepPlan, ...]
    regions: tuple[RegionPlan, ...]
    readings: tuple[AssetReading, ...]
    upstream: Mapping[str, set[AssetKey]]
    writers: Writers

    @property
    def assets(self) -> tuple[StepPlan, ...]:
        """The steps whose results are assets."""
        return tuple(one for one in self.steps if one.spec is not None)

    @property
    def keys(self) -> tuple[AssetKey, ...]:
        """The keys of its assets."""
        return tuple(one.key for one in self.assets)

    @property
    def entry(self) -> RegionPlan:
        """The region in which executions start."""
        return next(one for one in self.regions if one.starts)

    def run_config(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Returns the run config that overrides keys of the workload."""
        if not workload:
            return {}
        config = {"config": workload}
        return {"ops": {self.graph_name: config} if self.assets else config}


def plan_playbook(
    playbook: Playbook,
    made: PartitionsByAsset = MappingProxyType({}),
    specs: Mapping[str, AssetSpec] = MappingProxyType({}),
    writers: Writers | None = None,
) -> PlaybookPlan:
    """Plans the Dagster definitions of a playbook.

    Args:
        made: partitions of the assets that other playbooks of the code location make.
        specs: Dagster's descriptions of assets, by step; default: from the playbook.
        writers: the assets whose steps write a table; default: those of the playbook itself.
    """
    graph = StepGraph(playbook)
    partitions = PlaybookPartitions(playbook)
    reachable = [step.name for step in playbook.steps if step.name in graph.reachable]
    readings = tuple(readings_of(playbook, reachable, made))
    steps = _steps(playbook, graph, partitions, specs, readings)
    name = dagster_name(playbook.name)
    return PlaybookPlan(
        playbook,
        name,
        f"{name}_playbook",
        {PLAYBOOK_TAG: playbook.metadata.path} | {tag_key(tag): "" for tag in playbook.metadata.tags},
        partitions,
        tuple(steps.values()),
        _regions(playbook, graph, steps, readings),
        readings,
        _upstream(graph, steps, readings),
        writers or PlaybookWriters([playbook]),
    )


def _steps(
    playbook: Playbook,
    graph: StepGraph,
    partitions: PlaybookPartitions,
    specs: Mapping[str, AssetSpec],
    readings: Iterable[AssetReading],
) -> dict[str, StepPlan]:
    names = unique_names(step.name for step in playbook.steps if step.name in graph.reachable)
    assets = [name for name in names if playbook.step(name).is_asset]
    # the assets that request a run, which makes all of the playbook's: those that read other assets, or else the first
    readers = {step for reading in readings for step in reading.steps}
    automated = [name for name in assets if name in readers] or assets[:1]
    condition = condition_of(playbook.dagster.automation)
    planned = {}
    for name, op_name in names.items():
        step = playbook.step(name)
        spec = None
        if step.is_asset:
            spec = specs.get(name) or asset_spec(playbook, step)
            if condition is not None and spec.automation_condition is None and name in automated:
                spec = spec.replace_attributes(automation_condition=condition)
        planned[name] = StepPlan(
            step,
            op_name,
            f"{RESULT}_{op_name}" if graph.region_of[name].is_joint else RESULT,
            AssetKey(playbook.asset_key(name)),
            spec,
            tuple(check_specs(playbook, step, partitions.definition)) if step.is_asset else (),
        )
    return planned


def _regions(
    playbook: Playbook, graph: StepGraph, steps: Mapping[str, StepPlan], readings: Sequence[AssetReading]
) -> tuple[RegionPlan, ...]:
    planned: list[RegionPlan] = []
    on_spark: set[str] = set()
    for region in reversed(graph.regions):  # targets first
        if region.steps[0] not in steps:
            continue
        if on_spark.intersection(region.targets) or any(
            uses_spark(playbook, steps[name].step) for name in region.steps
        ):
            on_spark.update(region.steps)
        op = steps[region.name.removeprefix("region_") if region.is_joint else region.steps[0]].name
        planned.append(
            RegionPlan(
                region,
                f"region_{op}" if region.is_joint else op,
                tuple(steps[name] for name in region.steps),
                tuple(steps[name] for name in region.targets),
                tuple(one for one in readings if not set(one.steps).isdisjoint(region.steps)),
                starts=playbook.entry.name in region.steps,
                has_arcs=any(
                    source not in region.steps for name in region.steps for source in graph.predecessors[name]
                ),
                needs_spark=region.steps[0] in on_spark,
            )
        )
    return tuple(reversed(planned))


def _upstream(
    graph: StepGraph, steps: Mapping[str, StepPlan], readings: Iterable[AssetReading]
) -> dict[str, set[AssetKey]]:
    """Returns the lineage along the arcs, by graph output. Inside a cycle only arcs that lead forward count.

    Steps that are no assets are passed through: what leads to them leads to what comes after them.
    """
    position = {step: place for place, step in enumerate(steps)}
    read: dict[str, set[AssetKey]] = {step: set() for step in steps}
    for reading in readings:
        for step in reading.steps:
            read[step].add(reading.key)
    upstream: dict[str, set[AssetKey]] = {}
    for step, plan in steps.items():
        if plan.spec is None:
            continue
        keys: set[AssetKey] = set()
        waiting, seen = [step], {step}
        while waiting:
            at = waiting.pop()
            keys |= read[at]
            cycle = region.steps if (region := graph.region_of[at]).is_cycle else ()
            for source in graph.predecessors[at]:
                backwards = source in cycle and position.get(source, 0) >= position[at]
                if source in seen or source not in position or backwards:
                    continue
                seen.add(source)
                if steps[source].spec is not None:
                    keys.add(steps[source].key)
                else:
                    waiting.append(source)
        upstream[plan.output] = keys
    return upstream
