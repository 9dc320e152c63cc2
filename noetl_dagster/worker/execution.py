"""An execution in this process: its playbook, its state, and the names of its templates."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from noetl_dagster.errors import UndefinedNameError
from noetl_dagster.events.envelopes import Envelope, from_result
from noetl_dagster.events.state import ExecutionState, StepEnd
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.assets import Partition, ReadPartition, call_name
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.loader import with_settings
from noetl_dagster.playbook.models import LoopMode, Playbook
from noetl_dagster.playbook.templates.chunks import ChunkView
from noetl_dagster.playbook.templates.rendering import Fetch, render_input
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import LazyMapping, ReferenceCache, ResultView
from noetl_dagster.process.tracing import Trace
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.tools.base import NO_RUN, RunServices
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.program import StepProgram, compile_step

PROGRAMS_KEPT = 256
"""Steps kept with the settings that their visits gave them."""


@dataclass(eq=False, repr=False)
class StepResults(Mapping[str, Any]):
    """Views of the results of ended steps, the latest visit of each, and of other assets (``reads``).

    ``step`` is the one whose templates use them.
    """

    _playbook: Playbook
    _state: ExecutionState
    _cache: ReferenceCache
    _reads: Mapping[str, Any]
    _step: str

    @property
    def later(self) -> frozenset[str]:
        """Steps without a result."""
        return frozenset(step.name for step in self._playbook.steps) - self._state.latest.keys()

    @property
    def previous(self) -> ResultView | None:
        """Result of the step whose arc led to this one; of several, the one that ended last."""
        ends = [end for end in self._state.latest.values() if self._step in end.fired]
        latest = max(ends, key=lambda end: end.event_id, default=None)
        return None if latest is None else ResultView(latest.envelope, self._cache)

    def of_task(self, name: str) -> ResultView | None:
        """Returns the result of a task of an ended step; of several, that of the step that ended last."""
        steps = [step for step in self._playbook.steps if step.name in self._state.latest]
        named = [step.name for step in steps if any(task.named and task.name == name for task in step.tasks)]
        ends = sorted((self._state.latest[step] for step in named), key=lambda end: end.event_id, reverse=True)
        for envelope in (end.envelope for end in ends):
            results = envelope.get("results")
            if isinstance(results, Mapping):
                if name in results:
                    return ResultView(results[name], self._cache)
            elif results is None:  # its only task; the results of a loop are those of its items
                return ResultView(envelope, self._cache)
        return None

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
        count: number of partitions.
        envelopes: None until it is fetched; then shared by all commands of the visit in this process.
    """

    count: int
    reference: ResultRef | None = None
    envelopes: dict[str, Envelope] | None = None


def _opened(record: Mapping[str, Any]) -> Envelope | ReadPartitions:
    """Reads the record of an asset in ``step.enter``: one result, or several by partition."""
    if "partitions" in record:
        envelopes = {key: from_result(one) for key, one in record["partitions"].items()}
        return ReadPartitions(len(envelopes), envelopes=envelopes)
    envelope = from_result(record["result"])
    count = record.get("count")
    return envelope if count is None else ReadPartitions(count, envelope["ref"])


@dataclass(eq=False, repr=False)
class PartitionViews(LazyMapping):
    """Results by partition; views are made on access."""

    _read: ReadPartitions
    _cache: ReferenceCache

    def _envelopes(self) -> dict[str, Envelope]:
        read = self._read
        if read.envelopes is None:
            assert read.reference is not None
            fetched = self._cache.load(read.reference)
            read.envelopes = {name: from_result(one) for name, one in fetched.items()}
        return read.envelopes

    def __getitem__(self, key: str) -> ResultView:
        return ResultView(self._envelopes()[key], self._cache)

    def __contains__(self, key: object) -> bool:
        return key in self._envelopes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._envelopes())

    def __len__(self) -> int:
        return self._read.count


@dataclass(eq=False, repr=False)
class AssetReads:
    """``asset("warehouse/patients")`` in templates: the result that was read when the step was entered."""

    _reads: Mapping[str, Any]

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
        """Returns a step with rendered settings, which may differ between visits."""
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


@lru_cache(maxsize=64)
def _folder(file: str) -> str:
    return str(Path(file).parent) if file else "."


@dataclass(slots=True)
class Execution:
    """One execution in this process. Code that appends events also applies them to ``state``."""

    program: PlaybookProgram
    state: ExecutionState
    keychain: OpenKeychain | None = None
    trace: Trace | None = None
    services: RunServices = NO_RUN
    _reads: dict[tuple[str, int], dict[str, Envelope | ReadPartitions]] = field(default_factory=dict)
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
        return _folder(self.state.file)

    def visit(self, step: str, number: int = 1) -> Visit:
        """Returns a visit of a step, with its settings if they have been determined, which its entry does."""
        settings = self.state.settings.get((step, number))
        if settings is None:
            return Visit(self, self.program.step(step), number)
        return Visit(self, self.program.step_with(step, settings, self.state.workload), number)

    def scope(self, cache: ReferenceCache, step: str, entered: Event | None = None) -> Scope:
        """Returns the names of a step's templates; ``entered`` is its ``step.enter``, if that is not in the state yet.

        Writes of ``set`` to ctx stay in this scope until they are applied.
        """
        state = self.state
        visit = state.visits.get(step, 1) if entered is None else int(entered.meta["visit"])
        reads = {
            name: PartitionViews(read, cache) if isinstance(read, ReadPartitions) else ResultView(read, cache)
            for name, read in self._read(step, visit, entered).items()
        }
        if self._own is None:
            named = state.partition and Partition.model_validate(state.partition).names()
            self._own = {} if named is None else {"partition": named}
        own = {**self._own, "asset": AssetReads(reads)} if reads else self._own
        scope = Scope(
            execution_id=self.id,
            workload=state.workload,
            ctx=ChainMap({}, state.ctx),  # type: ignore[arg-type]
            steps=StepResults(self.playbook, state, cache, reads, step),
            own=own,
        )
        watermark = state.watermarks.get((step, visit))
        if watermark is None and entered is not None:
            watermark = (entered.context or {}).get("watermark")
        if watermark is None:
            return scope
        return scope.with_state({name: watermark[name] for name in ("value", "initial", "first")})

    def _read(self, step: str, visit: int, entered: Event | None) -> dict[str, Envelope | ReadPartitions]:
        """Returns the assets that a visit reads, opened once for all of its commands."""
        reads = self._reads.get((step, visit))
        if reads is None:
            records = self.state.reads.get((step, visit))
            logged = records is not None  # until then those of another driver may come into the log instead
            if records is None and entered is not None:
                records = (entered.context or {}).get("reads")
            reads = {name: _opened(one) for name, one in (records or {}).items()}
            if logged:
                self._reads[(step, visit)] = reads
        return reads


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit of a step: the step and the number of the visit, counted from 1."""

    execution: Execution
    program: StepProgram
    number: int

    @property
    def step(self) -> str:
        """Name of the step."""
        return self.program.step.name

    @property
    def key(self) -> tuple[int, str, int]:
        """Execution, step and number."""
        return self.execution.id, self.step, self.number

    @property
    def end(self) -> StepEnd | None:
        """The valid end of the visit, None before."""
        return self.execution.state.end_of(self.step, self.number)

    @property
    def has_lost_results(self) -> bool:
        """Reports that the bytes of some of its results are missing, so that their commands run again."""
        return (self.step, self.number) in self.execution.state.lost

    def scope(self, cache: ReferenceCache, entered: Event | None = None) -> Scope:
        """Returns the names of the step's templates; see :meth:`Execution.scope`."""
        return self.execution.scope(cache, self.step, entered)

    async def command_scope(
        self, command: Command, cache: ReferenceCache, fetch: Fetch, values: dict[str, Any] | None = None
    ) -> Scope:
        """Returns the names of a command: its iteration and the step's input on top of the step's.

        ``values`` are those that ``set`` wrote to ``iter`` so far; the attempts of an iteration share them.
        """
        execution, program = self.execution, self.program
        scope = execution.scope(cache, program.step.name)
        if execution.keychain is not None:
            scope = scope.with_keychain(await execution.keychain(scope, fetch))
        loop = program.step.loop
        if loop is not None and command.index is not None:
            item = ChunkView(command.item, cache) if loop.mode is LoopMode.STREAM else command.item
            scope = scope.with_iteration(
                loop.iterator, item, command.index, command.length, values, execution.state.outer_iteration
            )
        if program.step.input:
            scope = scope.with_input(await render_input(program.input, scope, fetch))
        return scope

    def command(self, **more: Any) -> Command:
        """Makes a command of the visit; ``more`` are other fields of :class:`Command`."""
        state = self.execution.state
        return Command(
            state.execution_id,
            self.step,
            self.number,
            catalog_id=state.catalog_id,
            parent_execution_id=state.parent_execution_id,
            **more,
        )
