"""The run server: a preloaded process that forks the drivers of runs.

It has one thread, no event loop and no connection but its own socket, so that drivers inherit nothing that a fork
breaks. Runs wait in a queue here. Those that Dagster has launched also have the status STARTING in Dagster's storage,
where the next server finds them; clients that started executions over HTTP submit them again.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import signal
import socket
import sys
import time
from bisect import insort
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path

import psutil

from noetl_dagster import machine
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.launcher.address import Address, stamp_of
from noetl_dagster.process import logs
from noetl_dagster.process.collector import share_heaps
from noetl_dagster.process.environment import hide_from_children
from noetl_dagster.process.forking import Channel, Message, fork, freeze_memory, listen
from noetl_dagster.settings import get_settings

logger = logging.getLogger(__name__)

IDLE_SECONDS = 600.0
"""Seconds without work after which a server ends."""

SPARE_SECONDS = 30.0
"""Seconds without work after which drivers beyond the first end."""

RETRY_SECONDS = 1.0
"""Seconds between a driver that failed to start and the next."""

TRIES = 5
"""Drivers in a row that may fail to start before requests are refused."""

MEASURE_SECONDS = 0.25
IDLE_SHARE = 0.2
"""Share of the cores that has to be idle for another driver, beyond one for each core."""

STALLED_SECONDS = 1.0
"""Seconds in which no run has ended, after which another driver starts although no core is idle."""

IMPORTED = (
    "dagster._cli.api",
    "dagster_postgres",
    "noetl_dagster.code_location.definitions",
    "noetl_dagster.code_location.launch",
    "noetl_dagster.launcher.driver",
    "noetl_dagster.launcher.engine_driver",
    "noetl_dagster.launcher.warm",
    "noetl_dagster.storage.tiers.objects",
    "noetl_dagster.tools.http.tool",
    "noetl_dagster.tools.python.tool",
)


FIRST = 1_000_000
"""Priority of the server's own requests."""


@dataclass(order=True, slots=True)
class QueuedRequest:
    """A request that waits, or that a driver handles.

    Attributes:
        rank: the negative of its priority: requests are ordered by it.
        number: of its arrival.
        id: of the run or execution.
        caller: is informed of the end.
    """

    rank: int
    number: int
    id: str = field(compare=False)
    message: Message = field(compare=False)
    caller: Channel | None = field(compare=False)


@dataclass(eq=False, slots=True)
class DriverProcess:
    """A driver, as its server sees it.

    Attributes:
        stamp: of the playbooks' files when it was forked.
        item: the request that it handles.
        many: requests that it handles side by side, by id; None for a driver of runs, which handles one.
        since: time of its latest request or message, monotonic.
    """

    pid: int
    channel: Channel
    stamp: object
    ready: bool = False
    item: QueuedRequest | None = None
    many: dict[str, QueuedRequest] | None = None
    ending: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        """True if it can take a request."""
        return self.ready and self.item is None and not self.many and not self.ending


class RunServer:
    """Serves until it must end, or until it has had no work for a while."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._listener = listen(str(address.socket))  # the caller holds the lock of Address.open
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._callers: set[Channel] = set()
        self._drivers: dict[int, DriverProcess] = {}
        self._waiting: list[QueuedRequest] = []  # sorted
        self._without_run: list[QueuedRequest] = []  # sorted; they wait for the driver of many
        self._engine_at_once = get_settings().engine_at_once
        self._count = itertools.count()
        self._begin_again = 0.0
        self._latest_end = 0.0
        self._measured = (0.0, 0.0)
        self._failed_begins = 0
        self._last_request = time.monotonic()
        self._ending = False

    def serve(self) -> None:
        """Imports what runs need, then serves."""
        for module in IMPORTED:
            import_module(module)
        freeze_memory()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self._add({"do": "recover", "id": "recover", "priority": FIRST})
        while not (self._ending and not self._waiting and not self._known()):
            if self._ending:
                self._stop_listening()
            self._assign()
            for key, _ in self._selector.select(timeout=MEASURE_SECONDS if self._waiting else 1.0):
                key.data()
            self._retire()
        self._stop_listening()
        for driver in self._drivers.values():
            self._end(driver)
        for driver in self._drivers.values():
            os.waitpid(driver.pid, 0)

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        caller = Channel(accepted)
        self._callers.add(caller)
        self._selector.register(caller, selectors.EVENT_READ, partial(self._handle_caller, caller))

    def _handle_caller(self, caller: Channel) -> None:
        messages = caller.arrived()
        if messages is None:
            self._forget(caller)
        for message in messages or ():
            match message["do"]:
                case "run" | "execute" if self._ending:
                    self._send(caller, {"refused": message["id"], "error": "the run server is ending"})
                case "execute" if message["runner"] == Runner.ENGINE:
                    self._add(message, caller)
                case "run" | "execute":
                    item = self._add(message, caller)
                    free = self._address.runs_at_once - len(self._driven())
                    ahead = max(0, self._waiting.index(item) + 1 - free)
                    self._send(caller, {"accepted": item.id, "ahead": ahead})
                case "withdraw":
                    before = len(self._waiting) + len(self._without_run)
                    for queue in (self._waiting, self._without_run):
                        queue[:] = [item for item in queue if item.id != message["id"]]
                    self._send(caller, {"withdrawn": len(self._waiting) + len(self._without_run) < before})
                case "ask":
                    self._send(caller, {"known": message["id"] in self._known()})
                case "status":
                    status = {
                        "pid": os.getpid(),
                        "waiting": [item.id for item in self._waiting],
                        "driven": [item.id for item in self._driven()],
                        "without_run": {
                            "waiting": [item.id for item in self._without_run],
                            "driven": [item.id for item in self._driven_without_run()],
                        },
                        "drivers": sorted(self._drivers),
                    }
                    self._send(caller, status)
                case "end":
                    self._ending = True
                    self._send(caller, {"ending": os.getpid()})

    def _handle_driver(self, driver: DriverProcess) -> None:
        messages = driver.channel.arrived()
        if messages is None:
            self._on_driver_exit(driver)
        for message in messages or ():
            driver.since = time.monotonic()
            if "ready" in message:
                driver.ready, self._failed_begins = True, 0
            elif driver.many is not None:
                if message["needs_replacement"] and not driver.ending:
                    self._end(driver)
                ended = driver.many.pop(message["ended"], None)
                if ended is not None and ended.caller is not None:
                    self._send(ended.caller, {"ended": ended.id, "error": None})
            elif "unfit" in message:
                item, driver.item, driver.ending = driver.item, None, True
                if item is not None:
                    insort(self._waiting, item)
            else:
                item, driver.item = driver.item, None
                self._latest_end = time.monotonic()
                driver.ending = driver.ending or message["needs_replacement"]
                for run_id, priority in message["answer"].get("runs", ()):  # of an earlier server
                    if run_id not in self._known():
                        self._add({"do": "run", "id": run_id, "priority": priority})
                if item is not None and item.caller is not None:
                    self._send(item.caller, {"ended": item.id, "error": message["answer"].get("error")})

    def _on_driver_exit(self, driver: DriverProcess) -> None:
        """Removes a driver that has ended; another driver reports the run that it drove."""
        self._selector.unregister(driver.channel)
        driver.channel.close()
        del self._drivers[driver.pid]
        _, status = os.waitpid(driver.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not driver.ready:
            self._failed_begins += 1
            self._begin_again = time.monotonic() + RETRY_SECONDS
            logger.error("a driver could not begin; see %s", self._address.log)
            if self._failed_begins >= TRIES:
                self._give_up()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        for lost in (driver.many or {}).values():
            self._resume(lost, f"the process that drove it, {driver.pid}, ended {how}")
        item = driver.item
        if item is None:
            return
        why = f"the process of this run, {driver.pid}, ended {how} without a report"
        logger.error("%s: %s", item.id, why)
        if item.message["do"] == "recover":
            insort(self._waiting, item)
        elif item.message["do"] in ("run", "execute"):
            report = {
                "do": "report_lost",
                "id": item.message.get("run_id", item.id),
                "why": why,
                "priority": FIRST,
            }
            self._add(report)
            if item.caller is not None:
                self._send(item.caller, {"ended": item.id, "error": why})

    def _resume(self, item: QueuedRequest, why: str) -> None:
        """Lets another process resume an execution, once. After that, the recovery sensor starts a run for it."""
        logger.error("%s: %s", item.id, why)
        if not item.message["resumed"] and not self._ending:
            item.message["resumed"] = True
            insort(self._without_run, item)
        elif item.caller is not None:
            self._send(item.caller, {"ended": item.id, "error": None})

    def _give_up(self) -> None:
        """Refuses all waiting requests, since no driver starts; the next caller starts a new server."""
        self._ending = True
        for item in [*self._waiting, *self._without_run]:
            if item.caller is not None:
                self._send(item.caller, {"refused": item.id, "error": f"no driver begins; see {self._address.log}"})
        self._waiting.clear()
        self._without_run.clear()

    def _add(self, message: Message, caller: Channel | None = None) -> QueuedRequest:
        self._last_request = time.monotonic()
        rank = -int(message.get("priority", 0))
        item = QueuedRequest(rank, next(self._count), str(message.get("id", "")), message, caller)
        insort(self._without_run if message.get("runner") == Runner.ENGINE else self._waiting, item)
        return item

    def _driven(self) -> list[QueuedRequest]:
        return [driver.item for driver in self._drivers.values() if driver.item is not None]

    def _driven_without_run(self) -> list[QueuedRequest]:
        return [item for driver in self._drivers.values() for item in (driver.many or {}).values()]

    def _known(self) -> set[str]:
        queues = (self._waiting, self._driven(), self._without_run, self._driven_without_run())
        return {item.id for queue in queues for item in queue}

    def _assign(self) -> None:
        """Hands waiting requests to drivers, and forks as many drivers as there is work for, at least one."""
        stamp = None
        if self._waiting or self._without_run or not self._drivers:
            stamp = stamp_of(get_settings().playbooks_path, ".yaml", ".yml", ".py", ".sql")
        for driver in list(self._drivers.values()):
            if stamp is not None and driver.is_idle and driver.stamp != stamp:
                self._end(driver)  # it has compiled the earlier playbooks
        while self._waiting and len(self._driven()) < self._address.runs_at_once:
            free = next((one for one in self._drivers.values() if one.is_idle and one.many is None), None)
            if free is None:
                break
            item = self._waiting.pop(0)
            free.item = item
            self._last_request = free.since = time.monotonic()
            try:
                free.channel.send(item.message)
            except OSError:
                free.item, free.ending = None, True
                item.rank = -FIRST
                insort(self._waiting, item)
        alive = [driver for driver in self._drivers.values() if driver.many is None and not driver.ending]
        coming = sum(1 for driver in alive if not driver.ready)
        wanted = min(len(self._waiting), self._address.runs_at_once - len(alive) + coming)
        if not alive and not self._ending:
            wanted = max(wanted, 1)
        if time.monotonic() >= self._begin_again:
            missing, spare_cores = wanted - coming, machine.cores() - len(alive)
            if missing > spare_cores:
                missing = max(spare_cores, int(self._is_another_useful()))
            for _ in range(missing):
                self._fork(stamp)
        if self._without_run:
            self._assign_without_run(stamp)

    def _is_another_useful(self) -> bool:
        """Reports whether cores were idle of late, or no run has ended: else drivers only take time from each other."""
        now, idle = time.monotonic(), psutil.cpu_times().idle
        began, before = self._measured
        if now - began < MEASURE_SECONDS:
            return False
        self._measured = now, idle
        if now - began > STALLED_SECONDS:  # nothing has waited meanwhile
            self._latest_end = now
            return False
        useful: bool = idle - before > IDLE_SHARE * machine.cores() * (now - began)
        if now - self._latest_end > STALLED_SECONDS:
            self._latest_end, useful = now, True
        return useful

    def _assign_without_run(self, stamp: object) -> None:
        """Hands executions without a run to the process that drives them side by side, which is forked if necessary."""
        drivers = [driver for driver in self._drivers.values() if driver.many is not None and not driver.ending]
        for driver in drivers:
            if driver.stamp != stamp:  # it has imported earlier code; it ends when it has driven what it has
                self._end(driver)
        current = [driver for driver in drivers if not driver.ending]
        if not current and time.monotonic() >= self._begin_again:
            self._fork(stamp, many={})
        for driver in current:
            assert driver.many is not None
            while driver.ready and self._without_run and len(driver.many) < self._engine_at_once:
                item = self._without_run.pop(0)
                driver.many[item.id] = item
                self._last_request = driver.since = time.monotonic()
                try:
                    driver.channel.send(item.message)
                except OSError:  # it has ended, and its requests are resumed
                    driver.ending = True
                    break

    def _fork(self, stamp: object, many: dict[str, QueuedRequest] | None = None) -> None:
        ours, theirs = socket.socketpair()
        channels = [*self._callers, *(driver.channel for driver in self._drivers.values())]
        become = partial(self._become_driver, theirs, many=many is not None)
        with theirs:
            pid = fork(become, [ours, self._listener, self._selector, *channels])
        driver = self._drivers[pid] = DriverProcess(pid, Channel(ours), stamp, many=many)
        self._selector.register(driver.channel, selectors.EVENT_READ, partial(self._handle_driver, driver))

    def _become_driver(self, sock: socket.socket, *, many: bool) -> None:
        """Becomes a driver in the forked process."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        from noetl_dagster.launcher.driver import Driver
        from noetl_dagster.launcher.engine_driver import EngineDriver

        (EngineDriver if many else Driver)(Channel(sock), self._address).main()

    def _retire(self) -> None:
        """Ends drivers that are not needed, and this server if it has had no work for a while."""
        now = time.monotonic()
        self._address.trim_log()
        idle = [driver for driver in self._drivers.values() if driver.is_idle]
        spare = [one for one in idle if one.many is None][1:] + [one for one in idle if one.many is not None]
        for driver in spare:
            if now - driver.since > SPARE_SECONDS:
                self._end(driver)
        waits = self._waiting or self._without_run
        if not waits and len(idle) == len(self._drivers) and now - self._last_request > IDLE_SECONDS:
            self._ending = True

    def _end(self, driver: DriverProcess) -> None:
        driver.ending = True
        try:
            driver.channel.send({"do": "end"})
        except OSError:
            logger.debug("driver %d is gone already", driver.pid)

    def _send(self, caller: Channel, message: Message) -> None:
        try:
            caller.send(message)
        except OSError:
            self._forget(caller)

    def _forget(self, caller: Channel) -> None:
        """Forgets a caller that has disconnected; its requests continue."""
        if caller in self._callers:
            self._callers.discard(caller)
            self._selector.unregister(caller)
            caller.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self._ending = True

    def _stop_listening(self) -> None:
        """Stops listening, so that the next caller starts a successor, which finds the waiting runs.

        Only reports of lost runs are still handled here.
        """
        if self._listener.fileno() != -1:
            self._selector.unregister(self._listener)
            self._address.socket.unlink(missing_ok=True)
            self._listener.close()
        self._waiting = [item for item in self._waiting if item.message["do"] == "report_lost"]
        self._without_run.clear()


def main() -> None:
    """``python -m noetl_dagster.launcher.server FOLDER KEY RUNS_AT_ONCE``, started by :class:`Address`."""
    folder, key, runs_at_once = sys.argv[1:]
    hide_from_children()  # the drivers inherit it
    share_heaps()  # and this
    logs.set_up(get_settings())
    RunServer(Address(Path(folder), key, dict(os.environ), int(runs_at_once))).serve()


if __name__ == "__main__":
    main()
