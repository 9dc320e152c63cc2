"""The canonical playbook: what any accepted spelling of the language normalises to.

Nothing here reads YAML or renders templates. Values that may hold templates are kept as they stand
in the file and are compiled by :mod:`noetl_dagster.playbook.templates.rendering`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from noetl_dagster.playbook.assets import AssetSpec, CheckSpec, DagsterSpec, Key, SourceSpec, key_text
from noetl_dagster.playbook.fields import Model, Seconds, Spelled, StoredPlace
from noetl_dagster.playbook.pods import Pod
from noetl_dagster.playbook.tool_kinds import AUTH, DATABASE_FILE, HTTP_BODY, MAX_IN_FLIGHT, SQL_FIELD, URL
from noetl_dagster.settings import DEFAULT_POOL, StoreTier


class LoopMode(StrEnum):
    """The way in which a loop runs its iterations."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    CHUNKED = "chunked"
    CURSOR = "cursor"
    STREAM = "stream"
    FANOUT = "fanout"


LOOP_MODES = {"async": LoopMode.PARALLEL}
"""Further words for a loop's mode."""


class RoutingMode(StrEnum):
    """The arcs that fire of those whose condition holds: the first, or all."""

    EXCLUSIVE = "exclusive"
    INCLUSIVE = "inclusive"


class Directive(StrEnum):
    """The action of a task policy."""

    CONTINUE = "continue"
    RETRY = "retry"
    JUMP = "jump"
    BREAK = "break"
    FAIL = "fail"


class Backoff(StrEnum):
    """The growth of the delay from one attempt to the next."""

    NONE = "none"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


class FanoutEngine(StrEnum):
    """The engine that runs the shards of a fan-out."""

    DAGSTER = "dagster"
    WORKERS = "workers"
    SPARK = "spark"


class ShardGranularity(StrEnum):
    """The content of a shard: one item, or consecutive items with one command and one result."""

    ITEM = "item"
    PARTITION = "partition"


class Dispatch(StrEnum):
    """The processes that run the commands of a step: the driver, or workers of a pool."""

    INLINE = "inline"
    WORKERS = "workers"


class CollectStrategy(StrEnum):
    """The way in which the pages of a paginated request are joined."""

    APPEND = "append"
    REPLACE = "replace"
    MERGE = "merge"


AnyBackoff = Annotated[Backoff, Spelled(words={"constant": Backoff.NONE, "fixed": Backoff.NONE})]
Delay = Annotated[Seconds, Spelled("initial_delay", "delay_seconds", "backoff_seconds")]
SqlText = Annotated[str | None, Spelled(*SQL_FIELD[1:])]


class PolicyAction(Model):
    """The action of a matching rule. ``attempts`` counts all tries of the task, the first included."""

    do: Directive = Directive.CONTINUE
    attempts: Annotated[int, Spelled("max_attempts")] = Field(3, ge=1)
    backoff: AnyBackoff = Backoff.NONE
    delay: Delay = Field(1.0, ge=0, description="seconds")
    to: str | None = Field(None, description="task to jump to; 'previous' is the one before")
    set: dict[str, Any] = Field(default_factory=dict)


class PolicyRule(Model):
    """``when`` is a template or a boolean; None is the ``else`` rule."""

    when: str | bool | None
    then: PolicyAction
    place: StoredPlace = None


class NextCall(Model):
    """The changes for the next call of a paginated request; values are templates over ``response``."""

    url: Annotated[str | None, Spelled(*URL[1:])] = None
    params: dict[str, Any] = Field(default_factory=dict)
    headers: dict[str, Any] = Field(default_factory=dict)
    body: Annotated[Any, Spelled(*(name for name in HTTP_BODY if name != "body"))] = None
    input: Annotated[dict[str, Any], Spelled("args")] = Field(default_factory=dict)


class Collect(Model):
    """The part of each response that a paginated request collects."""

    strategy: CollectStrategy = CollectStrategy.APPEND
    path: str | None = Field(None, description="dotted path of the collected part in the response")


class Sink(Model):
    """The target to which the result of each iteration or attempt is written exactly once."""

    tool: str = "postgres"
    table: str | None = None
    database: str | None = Field(None, description="of duckdb and sqlite: its file")
    path: Annotated[str | None, Spelled("uri")] = Field(
        None, description="of files and buckets: a folder of parts, or one file"
    )
    format: str | None = Field(None, description="parquet or jsonl")
    auth: Annotated[str | None, Spelled(*AUTH[1:])] = None
    mode: str = Field("append", description="append, replace or upsert")
    key: Annotated[tuple[str, ...], Spelled("keys", "key_columns")] = ()
    on_new_column: Annotated[str | None, Spelled("on_drift")] = Field(
        None, description="of tables: add, ignore or fail (the default) where they lack a column"
    )
    command: SqlText = Field(None, description="SQL instead of a table")
    args: Annotated[dict[str, Any], Spelled("input")] = Field(default_factory=dict)

    @property
    def is_staged(self) -> bool:
        """Reports whether it shares no transaction with the event log, so that its parts are published afterwards."""
        return self.tool != "postgres"

    @property
    def is_local(self) -> bool:
        """Reports whether staged files are on the machine of the process that wrote them."""
        return self.tool in ("duckdb", "sqlite", "file") or (self.path or "").startswith("file:")


ATTEMPTS = 3
"""Attempts of a call that fails, the first among them, where its rule names no number."""

PAGES = 100_000
"""Pages of a sequence whose rule names no number: one that never ends must not fill the event log."""


class RetryRule(Model):
    """One entry of a ``retry`` block. With ``next_call`` or ``collect`` it continues a success."""

    when: str | bool
    max_attempts: Annotated[int | None, Spelled("attempts")] = Field(
        None, ge=1, description="None: 3, but 100,000 pages"
    )
    backoff: AnyBackoff = Backoff.NONE
    delay: Delay = Field(1.0, ge=0, description="seconds")
    max_delay: Seconds | None = Field(None, ge=0, description="seconds that a delay grows to, at most")
    next_call: NextCall | None = None
    collect: Collect | None = None
    sink: Sink | None = None

    @property
    def continues_success(self) -> bool:
        """Reports whether the rule follows a success, as pagination does."""
        return self.next_call is not None or self.collect is not None

    def allows(self, made: int) -> bool:
        """Reports whether another attempt may follow so many."""
        return made < self.most

    @property
    def most(self) -> int:
        """The number of attempts, or of pages."""
        return self.max_attempts or (PAGES if self.continues_success else ATTEMPTS)


class ResultSpec(Model):
    """The storage of a task's result."""

    store: StoreTier | None = Field(None, description="tier; None: chosen by size and settings")
    threshold: int | None = Field(None, ge=0, description="bytes above which it is stored; None: as set")
    select: tuple[str, ...] = Field((), description="dotted paths of fields copied beside the reference")
    name: str | None = None
    scope: str = Field("execution", description="step, execution, workflow or permanent")
    ttl: float | None = Field(None, description="seconds")
    compression: str = Field("none", description="none, gzip or lz4")
    content_type: str | None = None


class Assertion(Model):
    """The keys that a task requires of its input and of its result."""

    expects: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()


class TaskSpec(Model):
    """Run-time settings of a task. Tool-specific ones stay in ``options``."""

    timeout: Seconds | None = Field(None, description="seconds")
    policy: tuple[PolicyRule, ...] = ()
    result: ResultSpec = ResultSpec()
    options: dict[str, Any] = Field(default_factory=dict)


Input = dict[str, Any] | str
"""Named values, or one template that gives a mapping of them."""


class Task(Model):
    """One tool call. ``config`` holds the tool's own fields under their canonical names."""

    name: str
    kind: str
    named: bool = Field(True, description="False when the playbook gave no name")
    config: dict[str, Any] = Field(default_factory=dict)
    input: Input = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    output: Any = Field(None, description="template that reshapes the result")
    auth: Any = Field(None, description="credential name or template, or a mapping of alias to name")
    spec: TaskSpec = TaskSpec()
    retry: tuple[RetryRule, ...] = ()
    sink: Sink | None = None
    asserts: Assertion = Assertion()
    settings: dict[str, str] = Field(default_factory=dict, description="of a workbook task; see Step")
    place: StoredPlace = None


class FanoutSpec(Model):
    """Settings of a fan-out."""

    engine: FanoutEngine = FanoutEngine.DAGSTER
    granularity: ShardGranularity = ShardGranularity.ITEM
    max_groups: int = Field(32, ge=1, description="dynamic outputs of the Dagster run, at most")
    max_shard_retries: int = Field(2, ge=0)
    fail_fast: bool = False
    allow_partial: bool = False
    max_concurrent: Annotated[int | None, Spelled("max_in_flight")] = Field(
        None, ge=1, description="shards of one group in flight; 64, in the pool 768"
    )
    shard_ttl: Seconds | None = Field(None, description="seconds")
    iter_key: str | None = Field(None, description="template of a shard's key; default: its index")


class CursorSpec(Model):
    """The query from which a cursor loop claims its rows."""

    kind: str = "postgres"
    auth: Annotated[Any, Spelled(*AUTH[1:])] = None
    database: Annotated[str | None, Spelled(*DATABASE_FILE[1:])] = Field(None, description="of sqlite: its file")
    claim: Annotated[str, Spelled(*SQL_FIELD)] = Field(description="SQL that claims work and returns rows")
    release: str | None = Field(None, description="SQL that releases a claimed row; its columns are names")


class FrameProcess(StrEnum):
    """The value of the iterator: one of the claimed rows, or all rows of a claim."""

    ROW = "row"
    FRAME = "frame"


class FrameSpec(Model):
    """Bounds of one cursor claim."""

    process: FrameProcess = FrameProcess.ROW
    max_rows: int = Field(100, ge=1)
    max_seconds: Seconds | None = None
    max_bytes: int | None = Field(None, ge=1)
    lease_seconds: Seconds | None = Field(
        None, gt=0, description="seconds of silence after which claimed rows are given back; 300"
    )
    heartbeat_seconds: Seconds | None = Field(None, gt=0, description="a third of the lease")
    row_concurrency: int = Field(1, ge=1)


class Loop(Model):
    """``collection`` is a literal or a template that gives a list; ``iterator`` names the item."""

    collection: Any = None
    iterator: str = "item"
    mode: Annotated[LoopMode, Spelled(words=LOOP_MODES)] = LoopMode.SEQUENTIAL
    max_in_flight: Annotated[int, Spelled(*MAX_IN_FLIGHT[1:])] = Field(16, ge=1)
    chunk_size: int | None = Field(None, ge=1)
    cursor: CursorSpec | None = None
    frame: FrameSpec = FrameSpec()
    fail_fast: bool = False
    allow_partial: bool = False
    strict_ctx: bool = False
    fanout: FanoutSpec = FanoutSpec()

    @property
    def is_sequential(self) -> bool:
        """Reports whether an iteration begins when the one before it has ended, and sees what that has set."""
        alone = self.mode is LoopMode.STREAM and self.max_in_flight == 1
        return alone or self.mode is LoopMode.SEQUENTIAL

    @property
    def may_fail_in_part(self) -> bool:
        """Reports whether the loop succeeds although iterations fail.

        A stream that ``fail_fast`` cuts off does not: its result could not report the chunks that were not taken.
        """
        return self.allow_partial and not (self.fail_fast and self.mode is LoopMode.STREAM)


CALL_PARTIAL = "call.partial"
"""The event (``on``) of an arc that passes chunks on while the step still makes them."""

STEP_DONE = "step.done"
LOOP_DONE = "loop.done"
STEP_FAILED = "step.failed"

ARC_EVENTS: Mapping[str, frozenset[str]] = {
    "step.done": frozenset({STEP_DONE, LOOP_DONE}),
    "call.done": frozenset({STEP_DONE, LOOP_DONE}),
    "loop.done": frozenset({LOOP_DONE}),
    "fanin.completed": frozenset({LOOP_DONE}),
    "loop.fanin.completed": frozenset({LOOP_DONE}),
    "step.failed": frozenset({STEP_FAILED}),
    "call.error": frozenset({STEP_FAILED}),
    "step.exit": frozenset({STEP_DONE, LOOP_DONE, STEP_FAILED}),
}
"""Words for the end of a step, in an arc's ``on`` and for ``event.name``, and the events that they mean."""

ARC_WORDS = (*ARC_EVENTS, CALL_PARTIAL)
"""The events that an arc may name."""


class Arc(Model):
    """One arc of a step's routing."""

    step: str
    when: str | bool | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    on: str | None = Field(None, description="event name that the arc waits for; None: any end of the step")
    place: StoredPlace = None

    @property
    def is_stream(self) -> bool:
        """Reports whether it feeds its step with the chunks of the one that it leaves, while they are made."""
        return self.on == CALL_PARTIAL


class Routing(Model):
    """The arcs of a step and how many of them may fire."""

    mode: RoutingMode = RoutingMode.EXCLUSIVE
    arcs: tuple[Arc, ...] = ()


class StepSpec(Model):
    """Run-time settings of a step. ``admit`` is a template; a false one leaves the step out."""

    admit: str | bool | None = None
    dispatch: Dispatch = Dispatch.INLINE
    max_attempts: int = Field(3, ge=1, description="tries of a command whose claim expires")
    priority: int = Field(0, ge=-1_000, le=1_000, description="in the pool: the higher goes first")
    weight: float = Field(1.0, ge=0.01, le=100, description="share of the pool beside other executions")
    strict_ctx: bool = False
    pool: str | None = Field(None, description="of workers, or Dagster's pool in which the op takes a slot")
    pod: Pod | None = Field(None, description="the step's op gets a pod of its own, which is like this")


class ConcurrentRuns(StrEnum):
    """The treatment of an execution that enters a step while another one loads up to the same watermark."""

    WAIT = "wait"
    FAIL = "fail"
    ALLOW = "allow"


class StateSpec(Model):
    """The watermark of a step, kept from one execution to the next."""

    key: str = Field(description="column of the result's rows whose greatest value counts, or a template")
    initial: Any = Field(None, description="the value before the first run; may be a template")
    name: str | None = Field(None, description="steps of one name share the value; default: the step's name")
    concurrent: ConcurrentRuns = Field(
        ConcurrentRuns.WAIT,
        description="while another execution loads up to the same value: wait, fail, or load as well",
    )


class Step(Model):
    """One step of the workflow."""

    name: str
    description: str = ""
    tasks: tuple[Task, ...] = ()
    loop: Loop | None = None
    input: Input = Field(default_factory=dict)
    output: Any = None
    set: dict[str, Any] = Field(default_factory=dict)
    routing: Routing = Routing()
    spec: StepSpec = StepSpec()
    is_asset: bool = True
    asset: AssetSpec = AssetSpec()
    checks: tuple[CheckSpec, ...] = ()
    sources: dict[str, SourceSpec] = Field(default_factory=dict, description="assets that the step reads")
    state: StateSpec | None = None
    settings: dict[str, str] = Field(default_factory=dict, description="those that are templates, by place")
    place: StoredPlace = None

    @property
    def is_fanout(self) -> bool:
        """Reports whether the step is a fan-out."""
        return self.loop is not None and self.loop.mode is LoopMode.FANOUT

    @property
    def wants_workers(self) -> bool:
        """Reports whether its commands are for worker processes."""
        fanned = self.loop is not None and self.is_fanout and self.loop.fanout.engine is FanoutEngine.WORKERS
        return fanned or self.spec.dispatch is Dispatch.WORKERS

    @property
    def worker_pool(self) -> str:
        """The pool whose workers take its commands."""
        return (self.spec.pool if self.wants_workers else None) or DEFAULT_POOL

    @property
    def dagster_pool(self) -> str | None:
        """Dagster's concurrency pool that its op takes a slot of."""
        return None if self.wants_workers else self.spec.pool

    @property
    def targets(self) -> tuple[str, ...]:
        """Steps that this one may route to, in arc order, each once."""
        return tuple(dict.fromkeys(arc.step for arc in self.routing.arcs))

    @property
    def streams_to(self) -> tuple[str, ...]:
        """Steps that take its chunks while they are made, in arc order, each once."""
        return tuple(dict.fromkeys(arc.step for arc in self.routing.arcs if arc.is_stream))


class Metadata(Model):
    """The playbook's ``metadata``."""

    name: str
    path: str = Field(description="catalog path, for example 'examples/patient_flow'")
    version: str | None = None
    description: str = ""
    tags: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()


class Tracing(Model):
    """A playbook's settings of traces; those that it leaves out come from the settings."""

    enabled: bool = Field(True, description="false: its executions have no traces")
    sampling: Annotated[float | None, Spelled("sample_rate", "sampling_rate")] = Field(
        None, ge=0, le=1, description="share of its executions whose traces are sent, 0 to 1"
    )
    endpoint: Annotated[str | None, Spelled("otlp_endpoint")] = Field(
        None, pattern="^https?://", description="collector of OTLP over HTTP: http://collector:4318"
    )
    service_name: str | None = Field(None, description="service.name of its spans")


MOST_WARNINGS = 10
"""Warnings of its playbook that an execution records."""

_WARNING_CHARACTERS = 1000


class Playbook(Model):
    """One playbook.

    Attributes:
        strict: each undefined name in a ``when`` is an error.
        settled: settings are templates of the workload; a playbook read with another workload has others.
        renamed: assets, its own and those it reads, that the code location gives another key.
        lenient: it was loaded leniently, and so are its children.
        warnings: what was not understood, and is ignored; only of one that was loaded leniently.
        source: its text, kept so that an execution never depends on the file.
    """

    metadata: Metadata
    steps: tuple[Step, ...]
    workload: dict[str, Any] = Field(default_factory=dict)
    keychain: tuple[dict[str, Any], ...] = ()
    workbook: dict[str, Task] = Field(default_factory=dict)
    pod: Pod | None = Field(None, description="what the pod of a run is like, where runs get pods")
    dagster: DagsterSpec = DagsterSpec()
    tracing: Tracing = Tracing()
    strict: bool = False
    settled: bool = False
    renamed: dict[str, str] = Field(default_factory=dict)
    lenient: bool = False
    warnings: tuple[str, ...] = ()
    source: str = ""
    file: str = "<playbook>"

    @cached_property
    def stored(self) -> str | None:
        """The model as JSON, without its text; None if it holds values that JSON cannot express."""
        values = self.model_dump(exclude={"source", "file", "renamed", "lenient"}, exclude_defaults=True, context={})
        try:
            return json.dumps(values, allow_nan=False)
        except (TypeError, ValueError):
            return None

    @classmethod
    def from_stored(
        cls, stored: str, source: str, *, file: str, renamed: Mapping[str, str], lenient: bool = False
    ) -> Playbook:
        """Loads what :attr:`stored` has written; a ValueError tells that it is damaged or of another version."""
        about = {"source": source, "file": file, "renamed": dict(renamed), "lenient": lenient}
        values = json.loads(stored)
        if not isinstance(values, dict):
            raise ValueError(f"a stored playbook is a mapping, not a {type(values).__name__}")
        values |= about
        return cls.model_validate(values, context={"file": file})

    @property
    def name(self) -> str:
        """Returns the playbook's name."""
        return self.metadata.name

    @property
    def main_warnings(self) -> list[str]:
        """The first warnings, shortened, and the number of the others: an execution shows few, and has its own."""
        most = _WARNING_CHARACTERS
        first = [text if len(text) <= most else f"{text[:most]}..." for text in self.warnings[:MOST_WARNINGS]]
        more = len(self.warnings) - len(first)
        return [*first, f"and {more} more; 'noetl-dagster check --lenient' lists them"] if more else first

    @property
    def entry(self) -> Step:
        """The step called ``start``, else the first one."""
        return next((step for step in self.steps if step.name == "start"), self.steps[0])

    def step(self, name: str) -> Step:
        """Raises ``KeyError`` when there is no such step."""
        return self._steps_by_name[name]

    @cached_property
    def _steps_by_name(self) -> dict[str, Step]:
        return {step.name: step for step in self.steps}

    def asset_key(self, step: str) -> Key:
        """Returns the key of a step's result: its own, or the parts of the playbook's path and the step's name."""
        return self.key_of(self.step(step).asset.key or (*self.metadata.path.strip("/").split("/"), step))

    def key_of(self, key: Key) -> Key:
        """Returns the key of an asset for the ``key`` in a playbook."""
        renamed = self.renamed.get(key_text(key)) if self.renamed else None
        return key if renamed is None else tuple(renamed.split("/"))
