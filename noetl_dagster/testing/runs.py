"""Runs playbooks in tests, with the tools of some steps replaced."""

from __future__ import annotations

import atexit
import fcntl
import inspect
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noetl_dagster import embedded
from noetl_dagster.embedded.isolation import isolated
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.lifecycle import admitted_workload
from noetl_dagster.engine.executions.results import value_of
from noetl_dagster.errors import NoetlError, ToolError
from noetl_dagster.events.state import ExecutionStatus, StepStatus
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.playbook.models import Dispatch, FanoutEngine, Playbook, Task
from noetl_dagster.playbook.wording import suggestion
from noetl_dagster.private_files import private_folder
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import RunServices, Tool, ToolCall, ToolContext, ToolResult
from noetl_dagster.worker.execution import PlaybookProgram


@dataclass(frozen=True, slots=True)
class PlaybookRun:
    """The outcome of a playbook that a test has run.

    Attributes:
        status: ``COMPLETED``, ``FAILED`` or ``CANCELLED``.
        error: the reason if it has not completed.
        results: by step, of those that have completed: mappings, lists, numbers and text as they are, tables as Arrow.
            A loop's result is a list.
        errors: by step, of those that have failed, whether an arc handled the failure or not.
        trail: the names of the steps in the order in which they ended, once for each visit.
        checks: by ``step.check``, whether the check has passed.
        ctx: the context, as all ``set`` blocks have left it.
    """

    execution_id: int
    status: ExecutionStatus
    error: str | None
    results: Mapping[str, Any]
    errors: Mapping[str, str]
    trail: tuple[str, ...]
    checks: Mapping[str, bool]
    ctx: Mapping[str, Any]


def run_playbook(
    playbook: Path | str | Playbook,
    workload: Mapping[str, Any] | None = None,
    *,
    mocks: Mapping[str, Any] | None = None,
    resource: EngineProvider | None = None,
) -> PlaybookRun:
    """Runs a playbook in this process, without Dagster, and returns its outcome, also if it fails.

    The engine, the event log and the stores are the real ones. Only the tools of the steps in ``mocks`` are replaced.
    Their inputs are still rendered, and their policies, retries, ``output``, ``set``, checks, sinks and arcs see the
    mocked result as a real one. Steps that name a pool of workers run in this process too.

    Args:
        playbook: a file, or a playbook that is loaded already.
        workload: keys that override the playbook's workload.
        mocks: by step, or by ``step.task`` if the step has several tasks: the result that its tool returns; an
            exception that it raises; or a function, which gets the :class:`ToolCall` with the rendered ``config`` and
            ``input`` and the names of its templates in ``scope``, and returns or raises one of these. A loop calls it
            for each item.
        resource: the engine; default: one with a database, a bucket and subjects that this process creates on first
            use and deletes at its end, on the servers of the folder ``.noetl-test`` (``NOETL_TEST_HOME``).

    Raises:
        PlaybookError: the file has errors; the message lists all of them.
        ValueError: ``mocks`` names a step or a task that the playbook does not have.

    Examples:
        >>> run = run_playbook("playbooks/visits.yaml", mocks={"fetch": [{"id": 1}], "notify": ToolError("no mail")})
        >>> run.trail
        ('fetch', 'count', 'notify')
    """
    loaded = playbook if isinstance(playbook, Playbook) else load_playbook(playbook)
    replaced = _Mocks(loaded, mocks or {})
    values = admitted_workload(workload or {})
    provider = resource or _own_resource()
    return provider.run(_run(provider.engine(), loaded, values, replaced))


async def _run(engine: Engine, playbook: Playbook, workload: dict[str, Any], mocks: _Mocks) -> PlaybookRun:
    execution = await engine.lifecycle.create(playbook, workload)
    local = _in_one_process(execution.playbook, mocks.steps)
    execution.program = PlaybookProgram(local, StepGraph(local))
    state = await engine.drive(execution, services=RunServices(tool_of=mocks.tool_of, processes=1))
    ends = sorted(state.ends.values(), key=lambda end: end.event_id)
    results = {
        end.step: await value_of(engine.runtime, end.envelope)
        for end in state.latest.values()
        if end.status is StepStatus.COMPLETED
    }
    return PlaybookRun(
        execution_id=execution.id,
        status=state.status,
        error=state.error,
        results=MappingProxyType(results),
        errors=MappingProxyType({end.step: end.failure for end in ends if end.status is StepStatus.FAILED}),
        trail=tuple(end.step for end in ends if end.status is not StepStatus.SKIPPED),
        checks=MappingProxyType({f"{one.step}.{one.name}": one.passed for one in state.checks.values()}),
        ctx=MappingProxyType(state.ctx),
    )


def _in_one_process(playbook: Playbook, mocked: Collection[str]) -> Playbook:
    """Returns a playbook whose steps need no workers, and whose mocked fan-outs start no Spark job."""
    steps = []
    for step in playbook.steps:
        loop = step.loop
        if loop is not None and (loop.fanout.engine is FanoutEngine.WORKERS or step.name in mocked):
            loop = loop.model_copy(update={"fanout": loop.fanout.model_copy(update={"engine": FanoutEngine.DAGSTER})})
        spec = step.spec.model_copy(update={"dispatch": Dispatch.INLINE})
        steps.append(step.model_copy(update={"spec": spec, "loop": loop}))
    return Playbook.model_construct(**{**dict(playbook), "steps": tuple(steps)})  # a copy would share what is cached


class _Mocks:
    """The tools that take the place of those of some tasks.

    Raises:
        ValueError: there is no such step or task.
    """

    def __init__(self, playbook: Playbook, mocks: Mapping[str, Any]) -> None:
        places: dict[str, tuple[str, str]] = {}
        for step in playbook.steps:
            places |= {f"{step.name}.{task.name}": (step.name, task.name) for task in step.tasks}
            if len(step.tasks) == 1:
                places[step.name] = (step.name, step.tasks[0].name)
        self._tools: dict[tuple[str, str], Tool] = {}
        for name, value in mocks.items():
            if name not in places:
                raise ValueError(_unknown(playbook, name, places))
            self._tools[places[name]] = _MockTool(value)

    @property
    def steps(self) -> set[str]:
        return {step for step, _ in self._tools}

    def tool_of(self, step: str, task: Task) -> Tool | None:
        return self._tools.get((step, task.name))


@dataclass(frozen=True, slots=True)
class _MockTool(Tool):
    """Returns or raises a value."""

    value: Any
    kind: str = "mock"

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        value = self.value
        if callable(value) and not _is_error(value):
            value = value(call)
            if inspect.isawaitable(value):
                value = await value
        if _is_error(value):
            raise value if isinstance(value, NoetlError) else _as_tool_error(call, value)
        return value if isinstance(value, ToolResult) else ToolResult(data=value)


def _is_error(value: Any) -> bool:
    return isinstance(value, Exception) or (isinstance(value, type) and issubclass(value, Exception))


def _as_tool_error(call: ToolCall, error: Exception | type[Exception]) -> ToolError:
    """Returns the error of a tool that fails with an exception of Python."""
    name = error.__name__ if isinstance(error, type) else type(error).__name__
    text = "" if isinstance(error, type) else str(error)
    return ToolError(f"{call.task.kind} in step {call.step}: {name}: {text}".rstrip(": "), kind="unknown", code=name)


def _unknown(playbook: Playbook, name: str, places: Mapping[str, Any]) -> str:
    tasks = [one for one in places if one.startswith(f"{name}.")]
    if tasks:
        return f"mocks: step {name!r} of playbook {playbook.name} has several tasks; mock {', '.join(tasks)}"
    if any(step.name == name for step in playbook.steps):
        return f"mocks: step {name!r} of playbook {playbook.name} has no tool"
    hint = suggestion(name, tuple(sorted(places)), "its steps")
    return f"mocks: playbook {playbook.name} has no step {name!r}; {hint}"


@contextmanager
def servers(home: Path) -> Iterator[Settings]:
    """Yields settings with the addresses of the servers of a folder; the last process that uses them stops them."""
    private_folder(home)
    with (home / "in-use.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        services = Settings(home=home)
        yield embedded.ensure(services)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_UN)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            embedded.down(services)


def home_of_tests(folder: Path) -> Path:
    """Returns the folder of the servers of tests: ``NOETL_TEST_HOME``, or ``.noetl-test`` below ``folder``."""
    return Path(os.environ.get("NOETL_TEST_HOME", folder / ".noetl-test")).resolve()


_own = ExitStack()
atexit.register(_own.close)


@cache
def _own_resource() -> EngineProvider:
    """Returns the engine of a database that lives as long as this process, or until :func:`close`."""
    services = _own.enter_context(servers(home_of_tests(Path.cwd())))
    folder = Path(_own.enter_context(tempfile.TemporaryDirectory(prefix="noetl-test-")))
    resource = EngineProvider(_own.enter_context(isolated(services, folder)))
    _own.callback(resource.close)
    return resource


def close() -> None:
    """Deletes the database of this process, and stops the servers unless others use them."""
    _own_resource.cache_clear()
    _own.close()
