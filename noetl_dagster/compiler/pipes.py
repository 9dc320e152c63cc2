"""Dagster Pipes: jobs that steps start outside log to the run, and add to the metadata of its assets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from dagster import (
    AssetCheckEvaluation,
    AssetKey,
    AssetMaterialization,
    MaterializeResult,
    OpExecutionContext,
    PipesBlobStoreMessageReader,
    PipesEnvContextInjector,
    PipesExecutionResult,
    PipesMessageReader,
    PipesTempFileMessageReader,
    open_pipes_session,
)

from noetl_dagster.errors import ReferenceNotAvailableError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.tools.base import JobMessages, ToolCall, ToolContext

OBJECT_SECONDS = 1.0
"""Seconds between two looks for messages in the object store."""


@dataclass(slots=True)
class PipesMessages:
    """The messages of one step's jobs.

    Attributes:
        metadata: of the step's own asset.
        events: materializations of other assets, and evaluations of checks.
        ops: how many of the run's ops drive the step now.
    """

    context: OpExecutionContext
    asset: AssetKey | None
    metadata: dict[str, Any] = field(default_factory=dict)
    events: list[AssetMaterialization | AssetCheckEvaluation] = field(default_factory=list)
    ops: int = 0

    def add(self, result: PipesExecutionResult) -> None:
        """Adds a result that a job has reported."""
        if isinstance(result, MaterializeResult):
            if result.asset_key == self.asset or result.asset_key is None:
                self.metadata |= result.metadata or {}
            else:
                self.events.append(AssetMaterialization(result.asset_key, metadata=result.metadata))
        elif result.asset_key is not None and result.check_name is not None:
            self.events.append(
                AssetCheckEvaluation(
                    asset_key=result.asset_key,
                    check_name=result.check_name,
                    passed=result.passed,
                    severity=result.severity,
                    metadata=result.metadata or {},
                )
            )


class JobReports:
    """What the jobs of one run's steps report, by step. Several ops may drive a step, as the groups of a fan-out do."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, str], PipesMessages] = {}  # by execution and step
        self._lock = threading.Lock()

    @contextmanager
    def receiving(
        self, execution_id: int, context: OpExecutionContext, assets: Mapping[str, AssetKey | None]
    ) -> Iterator[None]:
        """Lets jobs of the given steps report to an op's run while it drives them."""
        own: dict[tuple[int, str], PipesMessages] = {}
        with self._lock:
            for step, key in assets.items():
                name = (execution_id, step)
                messages = own[name] = self._messages.setdefault(name, PipesMessages(context, key))
                messages.context = context
                messages.ops += 1
        try:
            yield
        finally:
            with self._lock:
                for name, messages in own.items():
                    messages.ops -= 1
                    is_wanted = messages.ops or messages.metadata or messages.events  # until an op takes them
                    if not is_wanted and self._messages.get(name) is messages:
                        del self._messages[name]

    def of(self, execution_id: int, step: str) -> PipesMessages | None:
        """Returns the messages of a step that an op drives now."""
        return self._messages.get((execution_id, step))

    def take(self, execution_id: int, step: str) -> PipesMessages | None:
        """Returns and forgets the messages of a step's jobs."""
        with self._lock:
            return self._messages.pop((execution_id, step), None)


@asynccontextmanager
async def open_session(
    context: ToolContext, reports: JobReports, call: ToolCall, channel: JobMessages
) -> AsyncIterator[Mapping[str, str]]:
    """Opens the Pipes session of a job, and yields the variables of the job's environment.

    There are none if no op of the run drives the call's step, as for a step of a child playbook.
    """
    messages = reports.of(call.execution_id, call.step)
    if messages is None:
        yield {}
        return
    reader: PipesMessageReader = PipesTempFileMessageReader()
    if channel is JobMessages.OBJECTS:
        await context.results.ready(StoreTier.MINIO)
        name = f"pipes/{call.execution_id}/{call.step}-{call.command_id}-{call.attempt}"
        reader = _ObjectMessageReader(context.settings, name)
    with ExitStack() as stack:
        session = await asyncio.to_thread(
            stack.enter_context,
            open_pipes_session(
                context=cast(OpExecutionContext, _StepOpContext(messages.context)),
                context_injector=_StepContextInjector(messages.asset),
                message_reader=reader,
                extras={"execution": str(call.execution_id), "step": call.step, "attempt": call.attempt},
            ),
        )
        try:
            yield session.get_bootstrap_env_vars()
        finally:
            await asyncio.shield(asyncio.to_thread(stack.close))
            for result in session.get_reported_results():
                messages.add(result)


class _StepOpContext:
    """An op's context without the assets of the whole graph: the op makes only its own.

    Dagster would ask for every output of the op, and arcs that do not fire have none.
    """

    has_assets_def = False

    def __init__(self, context: OpExecutionContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _StepContextInjector(PipesEnvContextInjector):
    """Passes the asset of its step to the job."""

    def __init__(self, asset: AssetKey | None) -> None:
        self._asset = asset

    @contextmanager
    def inject_context(self, context_data: Any) -> Iterator[Any]:
        if self._asset is not None:
            key = self._asset.to_escaped_user_string()
            nothing = {key: None}
            versions = {"code_version_by_asset_key": nothing, "provenance_by_asset_key": nothing}
            context_data = {**context_data, "asset_keys": [key], **versions}
        with super().inject_context(context_data) as params:
            yield params


class _ObjectMessageReader(PipesBlobStoreMessageReader):
    """Reads the messages that ``PipesS3MessageWriter`` writes to the bucket of the minio store, and removes them."""

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(interval=OBJECT_SECONDS)
        self._settings = settings
        self._name = name
        self._uri = f"s3://{settings.minio_bucket}/{name}"

    @contextmanager
    def get_params(self) -> Iterator[Any]:
        try:
            yield {"bucket": self._settings.minio_bucket, "key_prefix": self._name}
        finally:
            locations.remove_below(self._settings, self._uri)

    def messages_are_readable(self, params: Any) -> bool:
        return True

    def download_messages_chunk(self, index: int, params: Any) -> str | None:
        try:
            return locations.read_bytes(self._settings, f"{self._uri}/{index}.json").decode()
        except ReferenceNotAvailableError:
            return None

    def no_messages_debug_text(self) -> str:
        return f"The job was to write its messages below {self._uri} with PipesS3MessageWriter."
