"""A worker process of the pool: claims commands, runs their tools, sends their events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter, OrderedDict
from dataclasses import replace

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from noetl_dagster.about import About
from noetl_dagster.engine.driving.liveness import Liveness
from noetl_dagster.engine.driving.watch import Watch
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionCancelledError, NoetlError, ServiceError
from noetl_dagster.event_loop import cancel_and_wait
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.pool_worker.control import ControlPlane, DirectControl, HttpControl
from noetl_dagster.pool_worker.notices import Notices, Offer
from noetl_dagster.settings import EventTransport, Settings
from noetl_dagster.transport.base import TransportOutlet
from noetl_dagster.transport.capacity import WorkerReport, publish_report
from noetl_dagster.transport.http import open_client
from noetl_dagster.transport.nats.connection import connect
from noetl_dagster.transport.nats.names import Names
from noetl_dagster.transport.open import open_transport
from noetl_dagster.worker.command import Command, Outcome, own_worker_id
from noetl_dagster.worker.context import Grant
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.runner import Call

logger = logging.getLogger(__name__)

EXECUTIONS = 64
"""Executions whose state a worker remembers."""

CHANGE_SECONDS = 0.25
"""A change of capacity is reported after so long, so that dispatch need not wait for the next interval."""

CLAIM_AGAIN_SECONDS = 5.0


class PoolWorker:
    """Runs commands of the queue, ``settings.worker_slots`` at once. Make it with :meth:`open`."""

    def __init__(self, runtime: Runtime, control: ControlPlane, client: NatsClient, worker_id: str) -> None:
        settings = runtime.settings
        assert settings.db_url is not None
        self._runtime = runtime
        self._liveness = Liveness(settings.db_url, runtime.pool)
        self._watch = Watch(runtime.pool, self._liveness)
        self._control = control
        self._client = client
        self._names = Names.of(settings)
        self._slots = settings.worker_slots
        self._active: Counter[str] = Counter()
        self._status = "ready"
        self._changed = asyncio.Event()
        self._executions: OrderedDict[int, tuple[str, Execution]] = OrderedDict()
        self._notices = Notices(client, settings, worker_id, self.room)
        self.worker_id = worker_id

    @classmethod
    async def open(cls, settings: Settings, worker_id: str | None = None) -> PoolWorker:
        """Connects to everything a worker needs.

        Commands come over NATS. Claims and contexts go over HTTP, or straight to the database with
        ``NOETL_EVENT_TRANSPORT=direct``; events as that setting says. Rows of ``noetl.result_ref`` and stored
        credentials are read and written in the database by every worker, which hears of cancellations there.

        Raises:
            ServiceError: NATS or the database cannot be reached.
        """
        worker_id = worker_id or own_worker_id()
        client = await connect(settings, f"worker {worker_id}")
        direct = settings.event_transport is EventTransport.DIRECT
        runtime = await Runtime.open(
            settings,
            apply=direct,
            outlet=lambda log: TransportOutlet(open_transport(settings, log, client)),
        )
        runtime.commands.worker_id = worker_id
        control: ControlPlane
        if direct:
            control = DirectControl(runtime.log, settings.command_heartbeat_timeout_seconds)
        else:
            control = HttpControl(open_client(settings))
        return cls(runtime, control, client, worker_id)

    @property
    def active(self) -> int:
        """Commands that run now."""
        return self._active.total()

    def room(self, tool_kind: str) -> int:
        """Further commands of a tool kind that may run now."""
        free = self._slots - self.active
        pools = self._runtime.settings.worker_tool_pools
        return min(free, pools[tool_kind] - self._active[tool_kind]) if tool_kind in pools else free

    def report(self) -> WorkerReport:
        """Its capacity, as it is sent with every heartbeat."""
        settings = self._runtime.settings
        return WorkerReport(
            worker_id=self.worker_id,
            status=self._status,
            slots=self._slots,
            available_slots=max(self._slots - self.active, 0),
            active_tasks=self.active,
            tool_pools={kind: max(self.room(kind), 0) for kind in settings.worker_tool_pools},
            interval=settings.worker_heartbeat_seconds,
            meta={"host": socket.gethostname(), "transport": settings.event_transport.value},
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Works until ``stop`` is set; then takes nothing more and lets what runs come to its end."""
        await self._watch.open()
        await self._control.register(self.report())
        await self._client.subscribe(f"{self._names.capacity}.report.now", cb=self._asked)
        await self._notices.open()
        reporting = asyncio.create_task(self._keep_reporting())
        serving = [asyncio.create_task(self._serve()) for _ in range(self._slots)]
        try:
            await stop.wait()
            await self._drain()
        finally:
            await cancel_and_wait(reporting, *serving)

    async def close(self) -> None:
        """Sends what is left to send and closes every connection."""
        self._status = "stopped"
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._send_report()
            await self._client.flush(timeout=2)
        await self._watch.close()
        await self._liveness.close()
        await self._runtime.close()
        await self._control.close()
        await self._client.close()

    async def _drain(self) -> None:
        self._status = "draining"
        await self._send_report()
        await self._notices.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._runtime.settings.worker_drain_seconds):
                while self.active:
                    self._changed.clear()
                    await self._changed.wait()
        if self.active:
            logger.warning("%d commands did not end in time; other workers will run them", self.active)

    async def _serve(self) -> None:
        """One slot: a command after another."""
        while True:
            offer = await self._notices.next()
            kind = offer.notice.tool_kind
            self._active[kind] += 1
            self._changed.set()
            notice = offer.notice
            try:
                with About(execution_id=notice.execution_id, command_id=notice.command_id):
                    await self._work(offer)
            except Exception:
                logger.exception("command %s: a defect in the worker", notice.command_id)
            finally:
                self._active[kind] -= 1
                self._changed.set()
                self._notices.freed.set()

    async def _work(self, offer: Offer) -> None:
        notice = offer.notice
        try:
            grant = await self._control.claim(
                notice.execution_id, notice.command_id, self.worker_id, self._runtime.ids.next()
            )
        except (ServiceError, OSError) as error:
            logger.warning("command %s cannot be claimed now: %s", notice.command_id, error)
            await offer.message.nak(delay=CLAIM_AGAIN_SECONDS)
            return
        await offer.message.ack()
        if grant is None:
            logger.debug("command %s is somebody else's, or has ended", notice.command_id)
            return
        try:
            execution = await self._execution(grant)
            command = await self._command(grant)
        except NoetlError as error:
            failed = Outcome(error_envelope(error))
            command = grant.context.command(grant.execution_id, None)
            await self._runtime.buffer.append([self._runtime.commands.ended(command, failed)])
            return
        try:
            await self._watch.guard(execution.id, self._run(execution, command, grant))
        except ExecutionCancelledError as error:  # which has ended the command in the log
            logger.info("command %s stops: %s", notice.command_id, error)

    async def _run(self, execution: Execution, command: Command, grant: Grant) -> None:
        context = grant.context
        if context.ctx is not None:
            execution = replace(execution, state=replace(execution.state, ctx=context.ctx))
        program = execution.program.step(command.step)
        call = Call(execution, program, command, dict(context.values), is_final=lambda _: context.final)
        await self._runtime.runner.run(call, claimed=True)

    async def _command(self, grant: Grant) -> Command:
        context = grant.context
        item = context.item
        if context.item_ref is not None:
            item = await self._runtime.results.get(context.item_ref)
        return context.command(grant.execution_id, item)

    async def _execution(self, grant: Grant) -> Execution:
        """The execution as it stood when the command was claimed; remembered while nothing happens to it."""
        known = self._executions.get(grant.execution_id)
        if known is not None and known[0] == grant.state_version:
            self._executions.move_to_end(grant.execution_id)
            return known[1]
        events = await self._control.lifecycle(grant.execution_id)
        state = ExecutionState.fold(grant.execution_id, events)
        execution = await self._runtime.assemble(state, self._control.source)
        self._executions[grant.execution_id] = (grant.state_version, execution)
        while len(self._executions) > EXECUTIONS:
            self._executions.popitem(last=False)
        return execution

    async def _keep_reporting(self) -> None:
        """A report at every interval, and one soon after each change."""
        interval = self._runtime.settings.worker_heartbeat_seconds
        while True:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._send_report()
            self._changed.clear()
            # asyncio.timeout, not wait_for: the latter may swallow a cancellation
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._changed.wait()
                    await asyncio.sleep(min(CHANGE_SECONDS, interval))

    async def _send_report(self) -> None:
        await publish_report(self._client, self._runtime.settings, self.report())

    async def _asked(self, message: Msg) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._send_report()
