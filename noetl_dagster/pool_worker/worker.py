"""The worker process of a pool: it claims commands, runs their tools and sends their events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import nats.errors
from nats.aio.msg import Msg

from noetl_dagster.engine.interruptions import InterruptionWatch
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionCancelledError, NoetlError, ServiceError
from noetl_dagster.events.connection import DATABASE_AWAY, DATABASE_ERRORS
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.transport.base import Transport
from noetl_dagster.events.transport.capacity import WorkerReport, announce_commands, publish_report
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.nats import NatsClient, connect, worker_inbox
from noetl_dagster.events.transport.nats_transport import open_transport
from noetl_dagster.pool_worker.claimer import Claimer
from noetl_dagster.pool_worker.control import ControlPlane, DirectControl, Executions, HttpControl
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.logs import LogContext
from noetl_dagster.settings import EventTransport, Settings
from noetl_dagster.worker.command import Command, Outcome, own_worker_id
from noetl_dagster.worker.context import CommandContext, Grant
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.runner import Call

logger = logging.getLogger(__name__)

LINGER_SECONDS = 0.02
"""Ends of commands wait this long for others while further commands wait for a slot; otherwise they do not wait."""

CHANGE_SECONDS = 0.25
"""Delay after which a change of capacity is reported, so that dispatch need not wait for the next interval."""


class PoolWorker:
    """Runs commands of the queue, ``settings.worker_slots`` at once. Create it with :meth:`open`."""

    def __init__(self, runtime: Runtime, control: ControlPlane, client: NatsClient, worker_id: str) -> None:
        settings = runtime.settings
        assert settings.db_url is not None
        self._runtime = runtime
        self._liveness = Liveness(settings.db_url, runtime.pool)
        self._watch = InterruptionWatch(runtime.pool, self._liveness)
        self._control = control
        self.client = client
        self._broadcast = client.names.broadcast(settings.worker_pool)
        self._targeted = client.names.targeted(settings.worker_pool, worker_id)
        self._slots = settings.worker_slots
        self._status = "ready"
        self._since = runtime.ids.next()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._executions = Executions(runtime, control)
        self._claims = Claimer(
            control,
            runtime.ids,
            worker_id,
            self._slots,
            self._executions,
            limits=settings.worker_tool_pools,
            interval=settings.worker_heartbeat_seconds,
        )
        self.worker_id = worker_id

    @classmethod
    async def open(cls, settings: Settings, worker_id: str | None = None) -> PoolWorker:
        """Connects to the services that a worker needs.

        NATS announces commands. Claims and contexts use HTTP, or the database with ``NOETL_EVENT_TRANSPORT=direct``;
        events use the transport of that setting. Results, stored credentials and cancellations need the database.
        """
        worker_id = worker_id or own_worker_id()
        inbox = worker_inbox(settings.worker_pool, worker_id)
        client = await connect(settings, f"worker {worker_id}", inbox=inbox)
        direct = settings.event_transport is EventTransport.DIRECT
        try:
            runtime = await Runtime.open(
                settings,
                apply=direct,
                writer=lambda log: open_transport(settings, log, client),
                worker_id=worker_id,
                linger=LINGER_SECONDS,
            )
        except ServiceError:
            await client.close()
            raise
        control: ControlPlane
        if direct:
            announce = partial(announce_commands, client, pool=settings.worker_pool)
            lease = settings.command_heartbeat_timeout_seconds
            control = DirectControl(runtime.log, lease, announce, settings.worker_pool)
        else:
            control = HttpControl(ApiClient(settings), settings.worker_pool)
        return cls(runtime, control, client, worker_id)

    @property
    def active(self) -> int:
        """Commands that run now."""
        return self._claims.active

    def report(self) -> WorkerReport:
        """Returns its capacity, as it is sent with every heartbeat."""
        settings, capacity = self._runtime.settings, self._claims.capacity
        return WorkerReport(
            worker_id=self.worker_id,
            status=self._status,
            pool=settings.worker_pool,
            slots=self._slots,
            available_slots=capacity(""),
            active_tasks=self.active,
            tool_pools={kind: capacity(kind) for kind in settings.worker_tool_pools},
            interval=settings.worker_heartbeat_seconds,
            since=self._since,
            meta={"host": socket.gethostname(), "transport": settings.event_transport.value},
        )

    @property
    def trouble(self) -> str | None:
        """The problem if a task that must not end while the worker is ready has ended, else None."""
        if self._status == "ready" and any(task.done() for task in (*self._tasks, *self._claims.tasks)):
            return "a task that claims, runs or reports has ended"
        return None

    async def run(self, stop: asyncio.Event, begun: Callable[[], None] = lambda: None) -> None:
        """Works until ``stop`` is set; then lets running commands end. Calls ``begun`` when it begins to claim.

        Raises:
            Exception: the defect that ended one of its tasks, once running commands have ended.
        """
        await self._watch.open()
        if not await self._register(stop):
            return
        for subject in (self._broadcast, self._targeted):
            await self.client.subscribe(subject, cb=self._announced)
        await self.client.subscribe(f"{self.client.names.capacity}.report.now", cb=self._send_report)
        self._claims.open()
        tasks = self._tasks = [asyncio.create_task(self._keep_reporting())]
        tasks += [asyncio.create_task(self._serve()) for _ in range(self._slots)]
        begun()
        stopping = asyncio.create_task(stop.wait())
        try:
            parts = (*tasks, *self._claims.tasks)
            await asyncio.wait((stopping, *parts), return_when=asyncio.FIRST_COMPLETED)
            ended = [part for part in parts if part.done() and not part.cancelled()]
            await self._drain()
            for part in ended:
                part.result()
        finally:
            await cancel_and_wait(stopping, *tasks)

    async def _register(self, stop: asyncio.Event) -> bool:
        """Registers; returns False if it is stopped before the control plane has answered."""
        registering = asyncio.create_task(self._control.register(self.report()))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((registering, stopping), return_when=asyncio.FIRST_COMPLETED)
            if registering.done():
                await registering
            return registering.done()
        finally:
            await cancel_and_wait(registering, stopping)

    async def _announced(self, message: Msg) -> None:
        """Claims waiting commands; without capacity, it passes on an announcement that only it has received."""
        self._claims.wake()
        if message.subject != self._broadcast and self._claims.free <= 0:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self.client.publish(self._broadcast, message.data)

    async def close(self) -> None:
        """Sends remaining events and closes every connection."""
        self._status = "stopped"
        with contextlib.suppress(nats.errors.Error, *DATABASE_ERRORS):
            await self._control.report(self.report())
            await self._send_report()
            await self.client.flush(timeout=2)
        await self._watch.close()
        await self._liveness.close()
        await self._runtime.close()
        writer = self._runtime.buffer.log
        if isinstance(writer, Transport):
            await writer.close()
        await self._control.close()
        await self.client.close()

    async def _drain(self) -> None:
        self._status = "draining"
        self._changed.set()
        await self._send_report()
        await self._claims.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._runtime.settings.worker_drain_seconds):
                await self._claims.idle()
        if self.active:
            logger.warning("%d commands did not end in time; other workers will run them", self.active)

    async def _serve(self) -> None:
        """Runs one command after another in a slot."""
        clock = asyncio.get_running_loop().time
        while True:
            claimed = await self._claims.next()
            self._changed.set()
            grant, begun = claimed.grant, clock()
            try:
                with LogContext(execution_id=grant.execution_id, command_id=grant.command_id):
                    await self._run_granted(grant, claimed.event_id)
            except (Exception, asyncio.CancelledError):
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                logger.exception("command %s: a defect in the worker, or in its tool", grant.command_id)
            finally:
                self._claims.ended(claimed, clock() - begun)
                if self._claims.free > 0:
                    self._runtime.buffer.hurry()
                self._changed.set()

    async def _run_granted(self, grant: Grant, claim: int) -> None:
        context, runtime = grant.context, self._runtime
        try:
            execution = await self._executions.of(grant)
            item = context.item
            if context.item_ref is not None:
                item = await runtime.results.get(context.item_ref)
        except NoetlError as error:
            failed = Outcome(error_envelope(error))
            command = context.command(grant.execution_id, None, claim)
            await runtime.buffer.append([runtime.commands.ended(command, failed)])
            return
        command = context.command(execution.id, item, claim)
        try:
            await self._watch.guard(execution.id, self._run(execution, command, context))
        except ExecutionCancelledError as error:  # the cancellation has ended the command in the log
            logger.info("command %s stops: %s", grant.command_id, error)

    async def _run(self, execution: Execution, command: Command, context: CommandContext) -> None:
        if context.ctx is not None:
            execution = replace(execution, state=replace(execution.state, ctx=context.ctx))
        visit = execution.visit(command.step, command.visit)
        call = Call(visit, command, dict(context.values), is_final=lambda _: context.final)
        await self._runtime.runner.run(call, claimed=True)

    async def _keep_reporting(self) -> None:
        """Reports at every interval and, over NATS only, soon after a change of what it reported."""
        interval = self._runtime.settings.worker_heartbeat_seconds
        clock = asyncio.get_running_loop().time
        written, reported = -interval, None
        while True:
            report, due = self.report(), clock() >= written + interval
            if due or report != reported:
                await self._send_report()
            if due or reported is None or report.status != reported.status:
                written = clock()
                with contextlib.suppress(*DATABASE_AWAY):
                    await self._control.report(report)
            reported = report
            self._changed.clear()
            # asyncio.timeout, not wait_for: the latter may swallow a cancellation
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(written + interval - clock(), 0)):
                    await self._changed.wait()
                    await asyncio.sleep(min(CHANGE_SECONDS, interval))

    async def _send_report(self, request: Msg | None = None) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await publish_report(self.client, self.report())
