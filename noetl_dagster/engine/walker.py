"""Drives whole executions in one process, without Dagster: child playbooks, tests and the command line."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from noetl_dagster.engine.executions.lifecycle import Lifecycle
from noetl_dagster.engine.executions.spark_ahead import prepare_spark
from noetl_dagster.engine.fanout.expand import Fanouts
from noetl_dagster.engine.interruptions import InterruptionWatch
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.regions import incoming, run_region, run_streams
from noetl_dagster.engine.steps.step import Steps
from noetl_dagster.errors import (
    ErrorKind,
    ExecutionCancelledError,
    PlaybookError,
    Problem,
    ProblemKind,
    ToolError,
    WorkloadError,
)
from noetl_dagster.events.connection import PATIENCE
from noetl_dagster.events.envelopes import Envelope
from noetl_dagster.events.queries import CHILD_OF_COMMAND
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.playbook.catalog import Catalog, folders_of, names_version
from noetl_dagster.playbook.graph import Region
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import loop_stats, plain
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.process.tracing import origin_of_child
from noetl_dagster.tools.base import ToolCall, ToolResult
from noetl_dagster.values import encode_json
from noetl_dagster.worker.command import CURRENT_ITEM_BYTES
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.results import exposed_in


@dataclass(frozen=True, slots=True)
class Walker:
    """Walks the graph of regions. Branches run at the same time; a join waits for all its possible sources."""

    _runtime: Runtime
    _steps: Steps
    _fanouts: Fanouts
    _lifecycle: Lifecycle

    async def run(self, execution: Execution) -> ExecutionStatus:
        """Runs every step that arcs reach and ends the execution."""
        graph = execution.program.graph
        ended = {region.name: asyncio.Event() for region in graph.regions}
        blocked: set[str] = set()
        sources: dict[str, set[str]] = {region.name: set() for region in graph.regions}
        for region in graph.regions:
            for target in region.targets:
                sources[graph.region_of[target].name].add(region.name)

        async def drive(region: Region) -> None:
            for source in sources[region.name]:
                await ended[source].wait()
            fails = bool(blocked & sources[region.name])
            if not fails and execution.state.is_running and incoming(execution, region):
                fails = await self._run_region(execution, region)
            if fails:
                blocked.add(region.name)
            ended[region.name].set()

        try:
            async with asyncio.TaskGroup() as group:
                for region in graph.regions:
                    group.create_task(drive(region))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return await self._lifecycle.finish_if_over(execution)

    async def _run_region(self, execution: Execution, region: Region) -> bool:
        """Runs a region; returns true if a failure in it was not handled."""
        await prepare_spark(self._runtime, execution)
        if region.is_joint:
            walk = run_streams if region.is_stream else run_region
            _, failure = await walk(self._steps, execution, region)
            return failure is not None
        step = region.steps[0]
        if execution.playbook.step(step).is_fanout:
            return (await self._fanouts.run(execution, step)).unhandled
        return (await self._steps.run(execution, step)).unhandled


@dataclass(frozen=True, slots=True)
class Children:
    """Runs child playbooks for the ``playbook`` tool."""

    _runtime: Runtime
    _lifecycle: Lifecycle
    _walker: Walker
    _watch: InterruptionWatch

    async def run(self, call: ToolCall) -> ToolResult:
        """Runs the child of a command, or resumes the one that an interrupted run of the command started.

        Raises:
            ToolError: there is no such playbook, it is invalid, it failed, or it took too long.
        """
        execution = await self._execution(call)
        execution.services = replace(call.services, tool_of=None)
        timeout = call.config.get("timeout")
        details = {"playbook": {"execution_id": str(execution.id), "path": execution.playbook.metadata.path}}
        try:
            async with asyncio.timeout(float(timeout) if timeout is not None else None):
                if execution.state.is_running:
                    work = self._walker.run(execution)
                    await self._watch.guard(execution.id, work, epoch=execution.state.epoch)
        except ExecutionCancelledError as error:
            raise ToolError(f"step {call.step}: child {error}", kind="cancelled", details=details) from None
        except TimeoutError:
            await self._lifecycle.cancel(execution.id, f"took longer than its timeout of {timeout} s")
            raise ToolError(
                f"step {call.step}: child execution {execution.id} took longer than {timeout} s; it was cancelled",
                kind="timeout",
                retryable=True,
                details=details,
            ) from None
        state = execution.state
        if state.status is not ExecutionStatus.COMPLETED:
            ends = sorted(state.latest.values(), key=lambda end: end.event_id, reverse=True)
            errors = (end.envelope.get("error") for end in ends)
            raise ToolError(
                f"step {call.step}: child execution {execution.id} of {execution.playbook.name!r} "
                f"ended {state.status}: {state.error}",
                kind=next((error["kind"] for error in errors if error), "unknown"),
                details=details,
            )
        return _result(state, call, details)

    async def _execution(self, call: ToolCall) -> Execution:
        child_id = await self._runtime.reads.fetchval(CHILD_OF_COMMAND, call.execution_id, call.command_id)
        if child_id is not None:
            execution = await self._runtime.load(child_id)
            if execution.state.status is ExecutionStatus.COMPLETED:
                return execution
            return await self._lifecycle.resume(child_id)
        playbook = await self._playbook(call)
        partition, choose = None, call.services.choose_partition
        try:
            if choose is not None and playbook.dagster.partitions:
                partition = choose(playbook, call.input)
            exposed_in(call.input, call, f"the workload of {playbook.name}")
            start = partial(
                self._lifecycle.create,
                playbook,
                call.input,
                execution_id=self._runtime.ids.next(),
                parent=(call.execution_id, call.step),
                origin={"parent_command": call.command_id, **_outer_iteration(call), **origin_of_child()},
                partition=partition,
            )
            return await with_retries(start, PATIENCE)
        except (PlaybookError, WorkloadError) as error:
            name = playbook.metadata.path
            raise ToolError(f"step {call.step}: child playbook {name!r}: {error}", kind="schema") from error

    async def _playbook(self, call: ToolCall) -> Playbook:
        path = str(call.config.get("path") or call.config.get("name") or "")
        try:
            return await self._of_version(path, call) or await self._of_folders(path, call)
        except PlaybookError as error:
            broken = [one for one in error.problems if one.kind is not ProblemKind.MISSING_PLAYBOOK]
            what = PlaybookError(broken) if broken else error
            kind: ErrorKind = "schema" if broken else "not_found"
            raise ToolError(f"step {call.step}: child playbook {path!r}: {what}", kind=kind) from error

    async def _of_version(self, path: str, call: ToolCall) -> Playbook | None:
        """Returns the registered playbook of ``path@version``, or of the path with a registered ``version``."""
        registered = self._runtime.registered
        if names_version(path):
            return await registered.load(path, lenient=call.lenient)
        wanted = f"{path}@{call.config.get('version')}"
        if names_version(wanted) and await registered.find(wanted) is not None:
            return await registered.load(wanted, lenient=call.lenient)
        return None

    async def _of_folders(self, path: str, call: ToolCall) -> Playbook:
        """Returns the playbook of a file, or else the one that is registered or has run under the path."""
        looked: list[Problem] = []
        for folder in folders_of(Path(call.folder), self._runtime.settings.playbooks_path):
            try:
                return Catalog(folder).load(path, lenient=call.lenient)
            except PlaybookError as error:
                looked += error.problems
        playbook = await self._runtime.registered.that_ran(path.strip("/"), lenient=call.lenient)
        if playbook is None:
            raise PlaybookError(looked)
        return playbook


def _outer_iteration(call: ToolCall) -> dict[str, Any]:
    """Returns ``iter`` of the loop that runs the child, for its ``iter.parent``.

    Leaves out an item that is too large for an event; pass such an item with ``input``.
    """
    turn = call.scope.iteration if isinstance(call.scope, Scope) else None
    if turn is None:
        return {}
    names = plain(turn.as_iter())
    if len(encode_json(names)) > CURRENT_ITEM_BYTES:
        names = {"index": turn.index}
    return {"parent_iter": names}


def _result(state: ExecutionState, call: ToolCall, details: dict[str, Any]) -> ToolResult:
    """Returns the result of ``return_step``, or else of the step that ended last."""
    wanted = call.config.get("return_step")
    if wanted is not None and wanted not in state.latest:
        raise ToolError(
            f"step {call.step}: child execution {state.execution_id} never ran its return_step {wanted!r}; "
            f"it ran {', '.join(state.latest) or 'nothing'}",
            kind="not_found",
            details=details,
        )
    envelope: Envelope = {"data": None}
    if wanted is not None:
        envelope = state.latest[wanted].envelope
    elif state.latest:
        envelope = max(state.latest.values(), key=lambda end: end.event_id).envelope
    if "ref" in envelope:
        return ToolResult(ref=envelope["ref"], details=details)
    data = envelope.get("data")
    if "results" in envelope and "data" not in envelope:
        results = [item.get("data", item) for item in envelope["results"]]
        counts = {key: envelope.get(key) for key in ("total", "done", "failed")}
        data = {**counts, "stats": loop_stats(envelope), "results": results, "data": results}
    return ToolResult(data=data, details=details)
