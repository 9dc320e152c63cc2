"""A worker process of the pool: claims commands, runs their tools, sends their events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from noetl_dagster.engine.interruptions import Watch
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionCancelledError, NoetlError, ServiceError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.transport.base import TransportOutlet
from noetl_dagster.events.transport.capacity import WorkerReport, publish_report, wake_all
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.nats.connection import connect
from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.events.transport.nats.transport import NatsTransport
from noetl_dagster.events.transport.open import open_transport
from noetl_dagster.pool_worker.claimer import Claimer
from noetl_dagster.pool_worker.control import ControlPlane, DirectControl, HttpControl
from noetl_dagster.pool_worker.executions import Executions
from noetl_dagster.pool_worker.notices import Notices
from noetl_dagster.pool_worker.single import SingleClaims
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.log_context import LogContext
from noetl_dagster.settings import EventTransport, Settings
from noetl_dagster.worker.command import Command, Outcome, own_worker_id
from noetl_dagster.worker.context import Grant
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.runner import Call

logger = logging.getLogger(__name__)

LINGER_MILLISECONDS = 20.0
"""Ends of commands wait so long for others while further commands wait for a slot; else they are sent at once."""

CHANGE_SECONDS = 0.25
"""A change of capacity is reported after so long, so that dispatch need not wait for the next interval."""


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
        self._wake_all = self._names.wake_all(settings.worker_pool)
        self._slots = settings.worker_slots
        self._status = "ready"
        self._since = runtime.ids.next()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._executions = Executions(runtime, control)
        self._notices = Notices(client, settings, worker_id, self.room)
        self._claims: Claimer | SingleClaims = Claimer(
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
        try:
            runtime = await Runtime.open(
                settings.model_copy(update={"event_buffer_milliseconds": LINGER_MILLISECONDS}),
                apply=direct,
                outlet=lambda log: TransportOutlet(open_transport(settings, log, client)),
            )
        except ServiceError:
            await client.close()
            raise
        runtime.commands.worker_id = worker_id
        control: ControlPlane
        if direct:
            wake = partial(wake_all, client, settings, pool=settings.worker_pool)
            lease = settings.command_heartbeat_timeout_seconds
            control = DirectControl(runtime.log, lease, wake, settings.worker_pool)
        else:
            control = HttpControl(ApiClient(settings), settings.worker_pool)
        return cls(runtime, control, client, worker_id)

    @property
    def client(self) -> NatsClient:
        """Its connection to NATS."""
        return self._client

    @property
    def active(self) -> int:
        """Commands that run now."""
        return self._claims.active

    def room(self, tool_kind: str) -> int:
        """Further commands of a tool kind that may run now."""
        return self._claims.room(tool_kind)

    def report(self) -> WorkerReport:
        """Its capacity, as it is sent with every heartbeat."""
        settings = self._runtime.settings
        return WorkerReport(
            worker_id=self.worker_id,
            status=self._status,
            pool=settings.worker_pool,
            slots=self._slots,
            available_slots=max(self.room(""), 0),
            active_tasks=self.active,
            tool_pools={kind: max(self.room(kind), 0) for kind in settings.worker_tool_pools},
            interval=settings.worker_heartbeat_seconds,
            batch=isinstance(self._claims, Claimer),
            since=self._since,
            meta={"host": socket.gethostname(), "transport": settings.event_transport.value},
        )

    @property
    def trouble(self) -> str | None:
        """What of it has come to an end that must not while it works."""
        if self._status == "ready" and any(task.done() for task in (*self._tasks, *self._claims.tasks)):
            return "a task that claims, runs or reports has ended"
        return None

    async def run(self, stop: asyncio.Event, begun: Callable[[], None] = lambda: None) -> None:
        """Works until ``stop`` is set; then takes nothing more and lets what runs come to its end.

        Args:
            begun: called as soon as it takes commands.
        """
        await self._watch.open()
        batches = await self._registered(stop)
        if batches is None:
            return
        if batches:
            await self._take_batches()
        else:
            self._take_singly()
        await self._client.subscribe(f"{self._names.capacity}.report.now", cb=self._asked)
        await self._notices.open()
        self._claims.open()
        tasks = self._tasks = [asyncio.create_task(self._keep_reporting())]
        tasks += [asyncio.create_task(self._serve()) for _ in range(self._slots)]
        if isinstance(self._claims, Claimer):
            tasks.append(asyncio.create_task(self._heed_notices()))
        begun()
        try:
            await stop.wait()
            await self._drain()
        finally:
            await cancel_and_wait(*tasks)

    async def _registered(self, stop: asyncio.Event) -> bool | None:
        """Whether commands may be claimed many at once; None: it was told to stop before anybody answered."""
        registering = asyncio.ensure_future(self._control.register(self.report()))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((registering, stopping), return_when=asyncio.FIRST_COMPLETED)
            return await registering if registering.done() else None
        finally:
            await cancel_and_wait(registering, stopping)

    async def _take_batches(self) -> None:
        outlet = self._runtime.buffer.log
        if isinstance(outlet, TransportOutlet) and isinstance(outlet.transport, NatsTransport):
            outlet.transport.batches = True
        for subject in (self._wake_all, self._names.wake_of(self.worker_id)):
            await self._client.subscribe(subject, cb=self._woken)

    def _take_singly(self) -> None:
        logger.info("the control plane is of an earlier version: commands are claimed one by one")
        self._claims = SingleClaims(
            self._control,
            self._runtime.ids,
            self.worker_id,
            self._slots,
            limits=self._runtime.settings.worker_tool_pools,
            notices=self._notices,
        )

    async def _woken(self, message: Msg) -> None:
        """Commands wait; one that is alone in knowing it, and has no room, tells the others."""
        self._claims.wake()
        if message.subject != self._wake_all and self._claims.free <= 0:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._client.publish(self._wake_all, message.data)

    async def _heed_notices(self) -> None:
        """A notice of one command, from a control plane that sends such, wakes too."""
        while True:
            offer = await self._notices.next()
            self._claims.wake()
            with contextlib.suppress(nats.errors.Error, OSError):
                await offer.message.ack()

    async def close(self) -> None:
        """Sends what is left to send and closes every connection."""
        self._status = "stopped"
        with contextlib.suppress(nats.errors.Error, *DATABASE_AWAY):
            await self._control.report(self.report())
            await self._send_report()
            await self._client.flush(timeout=2)
        await self._watch.close()
        await self._liveness.close()
        await self._runtime.close()
        outlet = self._runtime.buffer.log
        if isinstance(outlet, TransportOutlet):
            await outlet.transport.close()
        await self._control.close()
        await self._client.close()

    async def _drain(self) -> None:
        self._status = "draining"
        self._changed.set()
        await self._send_report()
        await self._notices.close()
        await self._claims.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._runtime.settings.worker_drain_seconds):
                await self._claims.idle()
        if self.active:
            logger.warning("%d commands did not end in time; other workers will run them", self.active)

    async def _serve(self) -> None:
        """One slot: a command after another."""
        clock = asyncio.get_running_loop().time
        while True:
            claimed = await self._claims.next()
            self._changed.set()
            grant, begun = claimed.grant, clock()
            try:
                with LogContext(execution_id=grant.execution_id, command_id=grant.command_id):
                    await self._work(grant)
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

    async def _work(self, grant: Grant) -> None:
        try:
            execution = await self._executions.of(grant)
            command = await self._command(grant)
        except NoetlError as error:
            failed = Outcome(error_envelope(error))
            command = grant.context.command(grant.execution_id, None)
            await self._runtime.buffer.append([self._runtime.commands.ended(command, failed)])
            return
        try:
            await self._watch.guard(execution.id, self._run(execution, command, grant))
        except ExecutionCancelledError as error:  # which has ended the command in the log
            logger.info("command %s stops: %s", grant.command_id, error)

    async def _run(self, execution: Execution, command: Command, grant: Grant) -> None:
        context = grant.context
        if context.ctx is not None:
            execution = replace(execution, state=replace(execution.state, ctx=context.ctx))
        program = execution.step(command.step, command.visit)
        call = Call(execution, program, command, dict(context.values), is_final=lambda _: context.final)
        await self._runtime.runner.run(call, claimed=True)

    async def _command(self, grant: Grant) -> Command:
        context = grant.context
        item = context.item
        if context.item_ref is not None:
            item = await self._runtime.results.get(context.item_ref)
        return context.command(grant.execution_id, item)

    async def _keep_reporting(self) -> None:
        """A report at every interval, and one soon after each change; the latter only over NATS."""
        interval = self._runtime.settings.worker_heartbeat_seconds
        clock = asyncio.get_running_loop().time
        written, status = -interval, ""
        while True:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._send_report()
            if clock() >= written + interval or self._status != status:
                written, status = clock(), self._status
                with contextlib.suppress(*DATABASE_AWAY):
                    await self._control.report(self.report())
            self._changed.clear()
            # asyncio.timeout, not wait_for: the latter may swallow a cancellation
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(written + interval - clock(), 0)):
                    await self._changed.wait()
                    await asyncio.sleep(min(CHANGE_SECONDS, interval))

    async def _send_report(self) -> None:
        await publish_report(self._client, self._runtime.settings, self.report())

    async def _asked(self, message: Msg) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._send_report()
