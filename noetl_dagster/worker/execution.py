"""An execution as a worker sees it: its playbook, its state, and the names its templates may use."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.errors import UndefinedNameError
from noetl_dagster.events.envelopes import from_result
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.assets import Partition, ReadPartition, call_name
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.templates.rendering import Fetch, render_input
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.pipeline import playbook_folder
from noetl_dagster.worker.program import StepProgram, compile_step


class StepResults(Mapping[str, Any]):
    """Results of the steps that ended, the latest visit of each, as views over one cache.

    Args:
        reads: results of other assets that the present step reads, by the names that it gives them.
    """

    def __init__(
        self, playbook: Playbook, state: ExecutionState, cache: ReferenceCache, reads: Mapping[str, Any]
    ) -> None:
        self._playbook = playbook
        self._state = state
        self._cache = cache
        self._reads = reads

    @property
    def later(self) -> frozenset[str]:
        """Steps without a result."""
        return frozenset(step.name for step in self._playbook.steps) - self._state.latest.keys()

    def __getitem__(self, step: str) -> Any:
        if step in self._reads:
            return self._reads[step]
        return ResultView(self._state.latest[step].envelope, self._cache)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._state.latest, **self._reads})

    def __len__(self) -> int:
        return len({**self._state.latest, **self._reads})


def read_views(kept: Mapping[str, Any], cache: ReferenceCache) -> Any:
    """What a step reads of an asset, as templates see it: one result, or a mapping of them by partition."""
    if "partitions" in kept:
        return {key: ResultView(from_result(one), cache) for key, one in kept["partitions"].items()}
    return ResultView(from_result(kept["result"]), cache)


class AssetReads:
    """``asset("warehouse/patients")`` in templates: what was read when the step was entered."""

    def __init__(self, reads: Mapping[str, Any]) -> None:
        self._reads = reads

    def __call__(self, key: str, partition: str = ReadPartition.SAME) -> Any:
        """The result of an asset; the key stands in the playbook as it is."""
        try:
            return self._reads[call_name(key, partition)]
        except KeyError:
            raise UndefinedNameError(
                f"asset({key!r}) was not read before the step began; write its key as a text, or in 'from'"
            ) from None


@dataclass(slots=True)
class PlaybookProgram:
    """A playbook with its graph and its compiled steps; shared by all executions of the same text."""

    playbook: Playbook
    graph: StepGraph
    _steps: dict[str, StepProgram] = field(default_factory=dict)

    def step(self, name: str) -> StepProgram:
        program = self._steps.get(name)
        if program is None:
            program = self._steps[name] = compile_step(self.playbook, self.playbook.step(name))
        return program


OpenKeychain = Callable[[Scope, Fetch], Awaitable[Mapping[str, Any]]]
"""Opens the playbook's keychain. Asked for each command, since tokens expire while an execution runs."""


@dataclass(slots=True)
class Execution:
    """One execution in this process. ``state`` is brought up to date by whoever appends events."""

    program: PlaybookProgram
    state: ExecutionState
    keychain: OpenKeychain | None = None

    @property
    def id(self) -> int:
        return self.state.execution_id

    @property
    def playbook(self) -> Playbook:
        return self.program.playbook

    @property
    def folder(self) -> str:
        return playbook_folder(self.state.file)

    def scope(self, cache: ReferenceCache, step: str, entered: Event | None = None) -> Scope:
        """The names that a step sees. What ``set`` writes to ctx stays in this scope until it is applied.

        Args:
            entered: the beginning of the visit, where it is not in the state yet.
        """
        state = self.state
        if entered is not None:
            read = (entered.context or {}).get("reads", {})
        else:
            read = state.reads.get((step, state.visits.get(step, 1)), {})
        reads = {name: read_views(kept, cache) for name, kept in read.items()}
        own: dict[str, Any] = {}
        if state.partition is not None:
            own["partition"] = Partition.model_validate(state.partition).names()
        if reads:
            own["asset"] = AssetReads(reads)
        return Scope(
            execution_id=self.id,
            workload=state.workload,
            ctx=ChainMap({}, state.ctx),  # type: ignore[arg-type]
            steps=StepResults(self.playbook, state, cache, reads),
            file=state.file,
            own=own,
        )

    async def command_scope(
        self,
        program: StepProgram,
        command: Command,
        cache: ReferenceCache,
        fetch: Fetch,
        values: dict[str, Any] | None = None,
    ) -> Scope:
        """The names of one command: its iteration and the step's input on top of the execution's.

        Args:
            values: what ``set`` wrote to ``iter`` so far; shared by the attempts of one iteration.
        """
        scope = self.scope(cache, program.step.name)
        if self.keychain is not None:
            scope = scope.with_keychain(await self.keychain(scope, fetch))
        loop = program.step.loop
        if loop is not None and command.index is not None:
            turn = (command.item, command.index, command.length)
            scope = scope.with_iteration(loop.iterator, *turn, values, self.state.outer_iteration)
        if program.step.input:
            scope = scope.with_input(await render_input(program.input, scope, fetch))
        return scope
