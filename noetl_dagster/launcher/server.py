"""The run server: has everything imported, and forks the processes that drive runs.

It has one thread, no event loop and no connection but its own socket, so that what it forks inherits nothing that a
fork breaks. What waits is a queue here and, for what Dagster has launched, the status STARTING in Dagster's storage,
where the next server finds it; who started executions over HTTP hands them in again.
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
"""A server without work for so long ends."""

SPARE_SECONDS = 30.0
"""Drivers beyond the first that have had no work for so long end."""

AGAIN_SECONDS = 1.0
"""Pause after a driver that could not even begin."""

TRIES = 5
"""Drivers in turn that may fail to begin while somebody waits for one."""

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
class Item:
    """Work that waits, or that a driver has."""

    message: Message
    caller: Channel | None = None
    """Who hears of its begin and its end."""

    @property
    def id(self) -> str:
        return str(self.message.get("id", ""))


@dataclass(eq=False, slots=True)
class Child:
    """A driver as its server sees it."""

    pid: int
    channel: Channel
    stamp: object
    ready: bool = False
    item: Item | None = None
    ending: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        return self.ready and self.item is None and not self.ending


class RunServer:
    """Serves until it is told to end, or until nobody has asked for anything for a while."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._listener = address.listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._callers: set[Channel] = set()
        self._children: dict[int, Child] = {}
        self._waiting: list[tuple[int, int, Item]] = []
        self._count = itertools.count()
        self._begin_again = 0.0
        self._failed_begins = 0
        self._busy = time.monotonic()
        self._ending = False

    def serve(self) -> None:
        for module in IMPORTED:
            import_module(module)
        gc.collect()
        gc.freeze()  # no collection in a child touches, and so copies, what it shares with this process
        signal.signal(signal.SIGTERM, self._told)
        signal.signal(signal.SIGINT, self._told)
        self._push(Item({"do": "recover", "id": "recover", "priority": 1_000_000}))
        while not (self._ending and not self._waiting and not any(c.item for c in self._children.values())):
            if self._ending:
                self._make_room()
            self._assign()
            for key, _ in self._selector.select(timeout=1.0):
                self._hear(key.fileobj)
            self._retire()
        self._close()

    def _hear(self, source: Any) -> None:
        if source is self._listener:
            self._accept()
        elif isinstance(source, Channel):
            messages = source.arrived()
            child = next((one for one in self._children.values() if one.channel is source), None)
            if child is not None:
                self._hear_child(child, messages)
            else:
                self._hear_caller(source, messages)

    def _accept(self) -> None:
        with_caller, _ = self._listener.accept()
        channel = Channel(with_caller)
        self._callers.add(channel)
        self._selector.register(channel, selectors.EVENT_READ)

    def _hear_caller(self, caller: Channel, messages: list[Message] | None) -> None:
        if messages is None:
            self._forget(caller)
            return
        for message in messages:
            match message["do"]:
                case "run" | "execute" if self._ending:
                    self._tell(caller, {"refused": message["id"], "error": "the run server is ending"})
                case "run" | "execute":
                    self._push(Item(message, caller))
                    self._tell(caller, {"accepted": message["id"], "ahead": self._ahead(message)})
                case "withdraw":
                    self._tell(caller, {"withdrawn": self._withdraw(message["id"])})
                case "ask":
                    known = message["id"] in self._known()
                    self._tell(caller, {"known": known})
                case "status":
                    self._tell(caller, self._status())
                case "end":
                    self._ending = True
                    self._tell(caller, {"ending": os.getpid()})

    def _hear_child(self, child: Child, messages: list[Message] | None) -> None:
        if messages is None:
            self._bury(child)
            return
        for message in messages:
            child.since = time.monotonic()
            if "ready" in message:
                child.ready, self._failed_begins = True, 0
            elif "unfit" in message:
                item, child.item, child.ending = child.item, None, True
                if item is not None:
                    self._push(item)
            else:
                self._done(child, message)

    def _done(self, child: Child, message: Message) -> None:
        item, child.item = child.item, None
        child.ending = child.ending or message["worn"]
        answer = message["answer"]
        if item is None:
            return
        if item.message["do"] == "recover":
            for run_id, priority in answer.get("runs", []):
                if run_id not in self._known():
                    self._push(Item({"do": "run", "id": run_id, "instance": "", "priority": priority}))
        elif item.caller is not None:
            self._tell(item.caller, {"ended": item.id, "error": answer.get("error")})

    def _bury(self, child: Child) -> None:
        """A driver is gone: where it drove a run, somebody must say so."""
        self._selector.unregister(child.channel)
        child.channel.close()
        del self._children[child.pid]
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not child.ready:
            self._failed_begins += 1
            self._begin_again = time.monotonic() + AGAIN_SECONDS
            logger.error("a driver could not begin; see %s", self._address.log)
            if self._failed_begins >= TRIES:
                self._give_up()
        item = child.item
        if item is None:
            return
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        why = f"the process of this run, {child.pid}, ended {how} without a word"
        logger.error("%s: %s", item.id, why)
        if item.message["do"] == "recover":
            self._push(item)
        elif item.message["do"] in ("run", "execute"):
            run_id = item.message.get("run_id", item.id)
            instance = item.message.get("instance", "")
            bury = {"do": "bury", "id": run_id, "instance": instance, "why": why, "priority": 1_000_000}
            self._push(Item(bury))
            if item.caller is not None:
                self._tell(item.caller, {"ended": item.id, "error": why})

    def _give_up(self) -> None:
        """No driver begins: who waits is told, so that it can go another way, and the next caller starts anew."""
        self._ending = True
        while self._waiting:
            item = heapq.heappop(self._waiting)[2]
            if item.caller is not None:
                self._tell(
                    item.caller, {"refused": item.id, "error": f"no driver begins; see {self._address.log}"}
                )

    def _push(self, item: Item) -> None:
        self._busy = time.monotonic()
        heapq.heappush(self._waiting, (-int(item.message.get("priority", 0)), next(self._count), item))

    def _withdraw(self, run_id: str) -> bool:
        left = [entry for entry in self._waiting if entry[2].id != run_id]
        found = len(left) < len(self._waiting)
        self._waiting = left
        heapq.heapify(self._waiting)
        return found

    def _known(self) -> set[str]:
        waiting = {entry[2].id for entry in self._waiting}
        return waiting | {child.item.id for child in self._children.values() if child.item is not None}

    def _ahead(self, message: Message) -> int:
        """Items that go before the one that has just come, beyond those for which a driver is free."""
        own = -int(message.get("priority", 0))
        before = sum(1 for priority, _, _ in self._waiting if priority <= own) - 1
        busy = sum(1 for child in self._children.values() if child.item is not None)
        return max(0, before + 1 - (self._address.runs_at_once - busy))

    def _status(self) -> Message:
        driven = [child.item.id for child in self._children.values() if child.item is not None]
        return {
            "pid": os.getpid(),
            "waiting": [entry[2].id for entry in sorted(self._waiting, key=lambda one: one[:2])],
            "driven": driven,
            "drivers": sorted(self._children),
        }

    def _assign(self) -> None:
        """Gives what waits to drivers, and has as many of them as there is work for, one at least."""
        stamp = _stamp(get_settings().playbooks_path) if self._waiting or not self._children else None
        for child in list(self._children.values()):
            if stamp is not None and child.is_idle and child.stamp != stamp:
                self._end(child)  # it has compiled playbooks as they were
        while self._waiting and (free := self._free()) is not None:
            item = heapq.heappop(self._waiting)[2]
            free.item = item
            self._busy = free.since = time.monotonic()
            try:
                free.channel.send(item.message)
            except OSError:
                free.item = None
                free.ending = True
                heapq.heappush(self._waiting, (-1_000_000, next(self._count), item))
                continue
            if item.caller is not None:
                self._tell(item.caller, {"begun": item.id})
        alive = [child for child in self._children.values() if not child.ending]
        coming = sum(1 for child in alive if not child.ready)
        wanted = min(len(self._waiting), self._address.runs_at_once - len(alive) + coming)
        if not alive and not self._ending:
            wanted = max(wanted, 1)
        if time.monotonic() >= self._begin_again:
            for _ in range(wanted - coming):
                self._fork(stamp)

    def _free(self) -> Child | None:
        busy = sum(1 for child in self._children.values() if child.item is not None)
        if busy >= self._address.runs_at_once:
            return None
        return next((child for child in self._children.values() if child.is_idle), None)

    def _fork(self, stamp: object) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()  # else the death of this process would go unnoticed
            self._become_driver(theirs)
        theirs.close()
        channel = Channel(ours)
        self._children[pid] = Child(pid, channel, stamp)
        self._selector.register(channel, selectors.EVENT_READ)

    def _become_driver(self, sock: socket.socket) -> None:
        """The child: nothing of its parent's but its modules. Never returns."""
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            self._listener.close()
            self._selector.close()
            for channel in [*self._callers, *(child.channel for child in self._children.values())]:
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
        """Ends drivers that are not needed, and this server when nobody has been here for a while."""
        now = time.monotonic()
        self._address.trim_log()
        idle = [child for child in self._children.values() if child.is_idle]
        for child in idle[1:]:
            if now - child.since > SPARE_SECONDS:
                self._end(child)
        if not self._waiting and len(idle) == len(self._children) and now - self._busy > IDLE_SECONDS:
            self._ending = True

    def _end(self, child: Child) -> None:
        child.ending = True
        try:
            child.channel.send({"do": "end"})
        except OSError:
            logger.debug("driver %d is gone already", child.pid)

    def _tell(self, caller: Channel, message: Message) -> None:
        try:
            caller.send(message)
        except OSError:
            self._forget(caller)

    def _forget(self, caller: Channel) -> None:
        """A caller is gone; what it has handed in goes on."""
        if caller in self._callers:
            self._callers.discard(caller)
            self._selector.unregister(caller)
            caller.close()

    def _told(self, number: int, frame: object) -> None:
        self._ending = True

    def _make_room(self) -> None:
        """Who comes from now on starts a successor, which finds what waits here; what must be told is told here."""
        if self._listener.fileno() != -1:
            self._selector.unregister(self._listener)
            (self._address.folder / f"{self._address.key}.sock").unlink(missing_ok=True)
            self._listener.close()
        self._waiting = [entry for entry in self._waiting if entry[2].message["do"] == "bury"]
        heapq.heapify(self._waiting)

    def _close(self) -> None:
        self._make_room()
        for child in self._children.values():
            self._end(child)
        for child in self._children.values():
            os.waitpid(child.pid, 0)


def _stamp(folder: Path) -> object:
    """Changes with the files of a folder of playbooks and the code beside them."""
    found = []
    for path in folder.rglob("*"):
        if path.suffix in (".yaml", ".yml", ".py", ".sql"):
            with suppress(OSError):  # an editor's lock that leads nowhere, a file that has just gone
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
