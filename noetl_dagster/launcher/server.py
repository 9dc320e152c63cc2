"""The run server: a preloaded process that forks the drivers of runs.

It has one thread, no event loop and no connection but its own socket, so that drivers inherit nothing that a fork
breaks. Runs wait in a queue here. Those that Dagster has launched also have the status STARTING in Dagster's storage,
where the next server finds them; clients that started executions over HTTP submit them again.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import logging
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from noetl_dagster.launcher.address import Address, Channel, Message
from noetl_dagster.process import logs
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

IMPORTED = (
    "dagster._cli.api",
    "dagster_postgres",
    "noetl_dagster.code_location.definitions",
    "noetl_dagster.code_location.launch",
    "noetl_dagster.launcher.driver",
    "noetl_dagster.launcher.warm",
    "noetl_dagster.storage.tiers.objects",
    "noetl_dagster.tools.http.tool",
    "noetl_dagster.tools.python.tool",
)


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits, or that a driver handles."""

    message: Message
    caller: Channel | None = None
    """Is informed of the start and the end."""

    @property
    def id(self) -> str:
        """The id of the run or execution."""
        return str(self.message.get("id", ""))


@dataclass(eq=False, slots=True)
class DriverProcess:
    """A driver, as its server sees it.

    Attributes:
        stamp: of the playbooks' files when it was forked.
        since: time of its latest request or message, monotonic.
    """

    pid: int
    channel: Channel
    stamp: object
    ready: bool = False
    item: QueuedRequest | None = None
    ending: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        """True if it can take a request."""
        return self.ready and self.item is None and not self.ending


class RunServer:
    """Serves until it must end, or until it has had no work for a while."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._listener = address.listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._callers: set[Channel] = set()
        self._drivers: dict[int, DriverProcess] = {}
        self._waiting: list[tuple[int, int, QueuedRequest]] = []
        self._count = itertools.count()
        self._begin_again = 0.0
        self._failed_begins = 0
        self._last_request = time.monotonic()
        self._ending = False

    def serve(self) -> None:
        """Imports what runs need, then serves."""
        for module in IMPORTED:
            import_module(module)
        gc.collect()
        gc.freeze()  # no collection in a driver writes to, and so copies, memory that it shares with this process
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self._push(QueuedRequest({"do": "recover", "id": "recover", "priority": 1_000_000}))
        while not (self._ending and not self._waiting and not any(c.item for c in self._drivers.values())):
            if self._ending:
                self._stop_listening()
            self._assign()
            for key, _ in self._selector.select(timeout=1.0):
                self._read(key.fileobj)
            self._retire()
        self._close()

    def _read(self, source: Any) -> None:
        if source is self._listener:
            self._accept()
        elif isinstance(source, Channel):
            messages = source.arrived()
            driver = next((one for one in self._drivers.values() if one.channel is source), None)
            if driver is not None:
                self._handle_driver(driver, messages)
            else:
                self._handle_caller(source, messages)

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        channel = Channel(accepted)
        self._callers.add(channel)
        self._selector.register(channel, selectors.EVENT_READ)

    def _handle_caller(self, caller: Channel, messages: list[Message] | None) -> None:
        if messages is None:
            self._forget(caller)
            return
        for message in messages:
            match message["do"]:
                case "run" | "execute" if self._ending:
                    self._send(caller, {"refused": message["id"], "error": "the run server is ending"})
                case "run" | "execute":
                    self._push(QueuedRequest(message, caller))
                    self._send(caller, {"accepted": message["id"], "ahead": self._count_ahead(message)})
                case "withdraw":
                    self._send(caller, {"withdrawn": self._withdraw(message["id"])})
                case "ask":
                    known = message["id"] in self._known()
                    self._send(caller, {"known": known})
                case "status":
                    self._send(caller, self._status())
                case "end":
                    self._ending = True
                    self._send(caller, {"ending": os.getpid()})

    def _handle_driver(self, driver: DriverProcess, messages: list[Message] | None) -> None:
        if messages is None:
            self._on_driver_exit(driver)
            return
        for message in messages:
            driver.since = time.monotonic()
            if "ready" in message:
                driver.ready, self._failed_begins = True, 0
            elif "unfit" in message:
                item, driver.item, driver.ending = driver.item, None, True
                if item is not None:
                    self._push(item)
            else:
                self._done(driver, message)

    def _done(self, driver: DriverProcess, message: Message) -> None:
        item, driver.item = driver.item, None
        driver.ending = driver.ending or message["needs_replacement"]
        answer = message["answer"]
        if item is None:
            return
        if item.message["do"] == "recover":
            for run_id, priority in answer.get("runs", []):
                if run_id not in self._known():
                    self._push(
                        QueuedRequest({"do": "run", "id": run_id, "instance": "", "priority": priority})
                    )
        elif item.caller is not None:
            self._send(item.caller, {"ended": item.id, "error": answer.get("error")})

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
        item = driver.item
        if item is None:
            return
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        why = f"the process of this run, {driver.pid}, ended {how} without a report"
        logger.error("%s: %s", item.id, why)
        if item.message["do"] == "recover":
            self._push(item)
        elif item.message["do"] in ("run", "execute"):
            run_id = item.message.get("run_id", item.id)
            instance = item.message.get("instance", "")
            report = {"do": "report_lost", "id": run_id, "instance": instance, "why": why}
            self._push(QueuedRequest({**report, "priority": 1_000_000}))
            if item.caller is not None:
                self._send(item.caller, {"ended": item.id, "error": why})

    def _give_up(self) -> None:
        """Refuses all waiting requests, since no driver starts; the next caller starts a new server."""
        self._ending = True
        while self._waiting:
            item = heapq.heappop(self._waiting)[2]
            if item.caller is not None:
                self._send(
                    item.caller, {"refused": item.id, "error": f"no driver begins; see {self._address.log}"}
                )

    def _push(self, item: QueuedRequest) -> None:
        self._last_request = time.monotonic()
        heapq.heappush(self._waiting, (-int(item.message.get("priority", 0)), next(self._count), item))

    def _withdraw(self, run_id: str) -> bool:
        left = [entry for entry in self._waiting if entry[2].id != run_id]
        found = len(left) < len(self._waiting)
        self._waiting = left
        heapq.heapify(self._waiting)
        return found

    def _known(self) -> set[str]:
        waiting = {entry[2].id for entry in self._waiting}
        return waiting | {driver.item.id for driver in self._drivers.values() if driver.item is not None}

    def _count_ahead(self, message: Message) -> int:
        """Counts the requests before the one that has just arrived, beyond those for which a driver is free."""
        own = -int(message.get("priority", 0))
        before = sum(1 for priority, _, _ in self._waiting if priority <= own) - 1
        busy = sum(1 for driver in self._drivers.values() if driver.item is not None)
        return max(0, before + 1 - (self._address.runs_at_once - busy))

    def _status(self) -> Message:
        driven = [driver.item.id for driver in self._drivers.values() if driver.item is not None]
        return {
            "pid": os.getpid(),
            "waiting": [entry[2].id for entry in sorted(self._waiting, key=lambda one: one[:2])],
            "driven": driven,
            "drivers": sorted(self._drivers),
        }

    def _assign(self) -> None:
        """Hands waiting requests to drivers, and forks as many drivers as there is work for, at least one."""
        stamp = _stamp(get_settings().playbooks_path) if self._waiting or not self._drivers else None
        for driver in list(self._drivers.values()):
            if stamp is not None and driver.is_idle and driver.stamp != stamp:
                self._end(driver)  # it has compiled the earlier playbooks
        while self._waiting and (free := self._free()) is not None:
            item = heapq.heappop(self._waiting)[2]
            free.item = item
            self._last_request = free.since = time.monotonic()
            try:
                free.channel.send(item.message)
            except OSError:
                free.item = None
                free.ending = True
                heapq.heappush(self._waiting, (-1_000_000, next(self._count), item))
                continue
            if item.caller is not None:
                self._send(item.caller, {"begun": item.id})
        alive = [driver for driver in self._drivers.values() if not driver.ending]
        coming = sum(1 for driver in alive if not driver.ready)
        wanted = min(len(self._waiting), self._address.runs_at_once - len(alive) + coming)
        if not alive and not self._ending:
            wanted = max(wanted, 1)
        if time.monotonic() >= self._begin_again:
            for _ in range(wanted - coming):
                self._fork(stamp)

    def _free(self) -> DriverProcess | None:
        busy = sum(1 for driver in self._drivers.values() if driver.item is not None)
        if busy >= self._address.runs_at_once:
            return None
        return next((driver for driver in self._drivers.values() if driver.is_idle), None)

    def _fork(self, stamp: object) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()  # else the driver would not notice the end of this process
            self._become_driver(theirs)
        theirs.close()
        channel = Channel(ours)
        self._drivers[pid] = DriverProcess(pid, channel, stamp)
        self._selector.register(channel, selectors.EVENT_READ)

    def _become_driver(self, sock: socket.socket) -> None:
        """Becomes a driver in the forked process, without the server's sockets. Never returns."""
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            self._listener.close()
            self._selector.close()
            for channel in [*self._callers, *(driver.channel for driver in self._drivers.values())]:
                channel.close()
            from noetl_dagster.launcher.driver import Driver

            Driver(Channel(sock), self._address).main()
            code = 0
        except BaseException:
            logger.exception("a driver ends")
        finally:
            logging.shutdown()
            os._exit(code)

    def _retire(self) -> None:
        """Ends drivers that are not needed, and this server if it has had no work for a while."""
        now = time.monotonic()
        self._address.trim_log()
        idle = [driver for driver in self._drivers.values() if driver.is_idle]
        for driver in idle[1:]:
            if now - driver.since > SPARE_SECONDS:
                self._end(driver)
        if not self._waiting and len(idle) == len(self._drivers) and now - self._last_request > IDLE_SECONDS:
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
            (self._address.folder / f"{self._address.key}.sock").unlink(missing_ok=True)
            self._listener.close()
        self._waiting = [entry for entry in self._waiting if entry[2].message["do"] == "report_lost"]
        heapq.heapify(self._waiting)

    def _close(self) -> None:
        self._stop_listening()
        for driver in self._drivers.values():
            self._end(driver)
        for driver in self._drivers.values():
            os.waitpid(driver.pid, 0)


def _stamp(folder: Path) -> object:
    """Returns a value that changes with the playbooks of a folder and the code next to them."""
    found = []
    for path in folder.rglob("*"):
        if path.suffix in (".yaml", ".yml", ".py", ".sql"):
            with suppress(OSError):  # a dangling link of an editor, or a file that was just removed
                status = path.stat()
                found.append((str(path), status.st_mtime_ns, status.st_size))
    return sorted(found)


def main() -> None:
    """``python -m noetl_dagster.launcher.server FOLDER KEY RUNS_AT_ONCE``, started by :class:`Address`."""
    folder, key, runs_at_once = sys.argv[1:]
    logs.set_up(get_settings())
    RunServer(Address(Path(folder), key, dict(os.environ), int(runs_at_once))).serve()


if __name__ == "__main__":
    main()
