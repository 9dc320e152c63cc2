"""An execution in this process: its playbook, its state, and the names of its templates."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.errors import UndefinedNameError
from noetl_dagster.events.envelopes import Envelope, from_result
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.assets import Partition, ReadPartition, call_name
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.loader import with_settings
from noetl_dagster.playbook.models import LoopMode, Playbook
from noetl_dagster.playbook.templates.chunks import ChunkView
from noetl_dagster.playbook.templates.rendering import Fetch, render_input
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import LazyMapping, ReferenceCache, ResultView
from noetl_dagster.process.tracing.trace import Trace
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.pipeline import playbook_folder
from noetl_dagster.worker.program import StepProgram, compile_step

STATE_NAMES = ("value", "initial", "first")
"""Fields of a watermark that templates see under ``state``."""

PROGRAMS_KEPT = 256
"""Steps kept with the settings that their visits gave them."""


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


@dataclass(slots=True)
class ReadPartitions:
    """Results of an asset by partition: in memory, or fetched when a template uses a partition.

    Attributes:
        found: None until it is fetched; then shared by all commands of the visit in this process.
    """

    keys: tuple[str, ...]
    reference: ResultRef | None = None
    found: dict[str, Envelope] | None = None

    def envelopes(self, cache: ReferenceCache) -> dict[str, Envelope]:
        """Returns the envelopes by partition.

        Raises:
            ReferenceNeeded: they have not been fetched yet.
        """
        if self.found is None:
            assert self.reference is not None
            kept = cache.load(self.reference)
            self.found = {key: from_result(one) for key, one in kept.items()}
        return self.found


Read = Envelope | ReadPartitions
"""The results of an asset that a step reads: one, or several by partition."""


def _opened(kept: Mapping[str, Any]) -> Read:
    """Reads the record of an asset in ``step.enter``."""
    if "partitions" in kept:
        found = {key: from_result(one) for key, one in kept["partitions"].items()}
        return ReadPartitions(tuple(found), found=found)
    envelope = from_result(kept["result"])
    return ReadPartitions(tuple(kept["keys"]), envelope["ref"]) if "keys" in kept else envelope


def _view(read: Read, cache: ReferenceCache) -> Any:
    return PartitionViews(read, cache) if isinstance(read, ReadPartitions) else ResultView(read, cache)


class PartitionViews(LazyMapping):
    """Results by partition; views are made on access."""

    def __init__(self, read: ReadPartitions, cache: ReferenceCache) -> None:
        self._read = read
        self._cache = cache

    def __getitem__(self, key: str) -> ResultView:
        if key not in self._read.keys:
            raise KeyError(key)
        return ResultView(self._read.envelopes(self._cache)[key], self._cache)

    def __contains__(self, key: object) -> bool:
        return key in self._read.keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._read.keys)

    def __len__(self) -> int:
        return len(self._read.keys)


class AssetReads:
    """``asset("warehouse/patients")`` in templates: the result that was read when the step was entered."""

    def __init__(self, reads: Mapping[str, Any]) -> None:
        self._reads = reads

    def __call__(self, key: str, partition: str = ReadPartition.SAME) -> Any:
        """Returns the result of an asset; ``key`` is a literal in the playbook."""
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
    _with_settings: dict[tuple[str, str], StepProgram] = field(default_factory=dict)

    def step(self, name: str) -> StepProgram:
        """Returns a compiled step."""
        program = self._steps.get(name)
        if program is None:
            program = self._steps[name] = compile_step(self.playbook, self.playbook.step(name))
        return program

    def step_with(self, name: str, settings: Mapping[str, Any], workload: Mapping[str, Any]) -> StepProgram:
        """Returns a step with rendered settings, which may differ between visits.

        Raises:
            PlaybookError: one of them has a value that is not allowed.
        """
        key = (name, repr(settings))
        program = self._with_settings.get(key)
        if program is None:
            if len(self._with_settings) >= PROGRAMS_KEPT:
                self._with_settings.clear()
            playbook = with_settings(self.playbook, name, settings, workload)
            program = self._with_settings[key] = compile_step(playbook, playbook.step(name))
        return program


OpenKeychain = Callable[[Scope, Fetch], Awaitable[Mapping[str, Any]]]
"""Opens the playbook's keychain. Called for each command, since tokens expire while an execution runs."""


@dataclass(slots=True)
class Execution:
    """One execution in this process. Code that appends events also applies them to ``state``.

    Attributes:
        trace: None if none is recorded.
    """

    program: PlaybookProgram
    state: ExecutionState
    keychain: OpenKeychain | None = None
    trace: Trace | None = None
    _reads: dict[tuple[str, int], dict[str, Read]] = field(default_factory=dict)
    _own: dict[str, Any] | None = None

    @property
    def id(self) -> int:
        """The execution id."""
        return self.state.execution_id

    @property
    def playbook(self) -> Playbook:
        """The playbook."""
        return self.program.playbook

    @property
    def folder(self) -> str:
        """Folder of the playbook file, for relative paths."""
        return playbook_folder(self.state.file)

    def command(self, step: str, visit: int, **more: Any) -> Command:
        """Makes a command of this execution; ``more`` are other fields of :class:`Command`."""
        state = self.state
        return Command(
            state.execution_id,
            step,
            visit,
            catalog_id=state.catalog_id,
            parent_execution_id=state.parent_execution_id,
            **more,
        )

    def step(self, name: str, visit: int) -> StepProgram:
        """Returns a step with the settings of a visit, which were determined when it was entered."""
        settings = self.state.settings.get((name, visit))
        if settings is None:
            return self.program.step(name)
        return self.program.step_with(name, settings, self.state.workload)

    def scope(self, cache: ReferenceCache, step: str, entered: Event | None = None) -> Scope:
        """Returns the names of a step's templates. Writes of ``set`` to ctx stay in this scope until they are applied.

        Args:
            entered: ``step.enter`` of the visit, if it is not in the state yet.
        """
        state = self.state
        visit = state.visits.get(step, 1) if entered is None else int(entered.meta["visit"])
        reads = {name: _view(read, cache) for name, read in self._read(step, visit, entered).items()}
        if self._own is None:
            partition = state.partition
            self._own = (
                {} if partition is None else {"partition": Partition.model_validate(partition).names()}
            )
        own = {**self._own, "asset": AssetReads(reads)} if reads else self._own
        scope = Scope(
            execution_id=self.id,
            workload=state.workload,
            ctx=ChainMap({}, state.ctx),  # type: ignore[arg-type]
            steps=StepResults(self.playbook, state, cache, reads),
            file=state.file,
            own=own,
        )
        kept = state.watermarks.get((step, visit))
        if kept is None and entered is not None:
            kept = (entered.context or {}).get("watermark")
        return scope if kept is None else scope.with_state({name: kept[name] for name in STATE_NAMES})

    def _read(self, step: str, visit: int, entered: Event | None) -> dict[str, Read]:
        """Returns the assets that a visit reads, opened once for all of its commands."""
        found = self._reads.get((step, visit))
        if found is None:
            kept = self.state.reads.get((step, visit))
            if kept is None and entered is not None:
                kept = (entered.context or {}).get("reads")
            if not kept:
                return {}
            found = self._reads[(step, visit)] = {name: _opened(one) for name, one in kept.items()}
        return found

    async def command_scope(
        self,
        program: StepProgram,
        command: Command,
        cache: ReferenceCache,
        fetch: Fetch,
        values: dict[str, Any] | None = None,
    ) -> Scope:
        """Returns the names of one command: its iteration and the step's input on top of the execution's.

        Args:
            values: values that ``set`` wrote to ``iter`` so far; shared by the attempts of one iteration.
        """
        scope = self.scope(cache, program.step.name)
        if self.keychain is not None:
            scope = scope.with_keychain(await self.keychain(scope, fetch))
        loop = program.step.loop
        if loop is not None and command.index is not None:
            item = ChunkView(command.item, cache) if loop.mode is LoopMode.STREAM else command.item
            turn = (item, command.index, command.length)
            scope = scope.with_iteration(loop.iterator, *turn, values, self.state.outer_iteration)
        if program.step.input:
            scope = scope.with_input(await render_input(program.input, scope, fetch))
        return scope
