"""Starts the embedded services, restarts those that died, and stops them.

The file ``services.json`` in the state folder records each service with its secrets, and a lock serialises starts. Only
the user who starts the services may read the file.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from noetl_dagster.embedded import processes
from noetl_dagster.embedded.object_store import ObjectStore
from noetl_dagster.embedded.postgres import Postgres
from noetl_dagster.embedded.servers import Nats, RecordsApi, Service, ServiceName
from noetl_dagster.errors import ServiceError
from noetl_dagster.private_files import closed_folder, private_file, private_folder, write_private
from noetl_dagster.settings import Settings

_SERVICES: dict[ServiceName, type[Service]] = {one.name: one for one in (Postgres, Nats, ObjectStore, RecordsApi)}

PORT_TAKEN = "address already in use"
"""Part of the log, in lower case, of a server whose port another program took between its choice and its use."""

MOST_LAUNCHES = 3


class ServiceRecord(BaseModel, frozen=True):
    """The record of one service. Ports are kept when it stops, so that addresses stay the same."""

    ports: dict[str, int]  # of each listener, on 127.0.0.1
    pid: int | None = None  # of the main process; None if it was stopped
    started: str = ""  # its processes.start_mark
    ready: bool = False  # it has served requests since it started
    url: str = ""
    secrets: dict[str, str] = {}


class ServicesFile(BaseModel):
    """The contents of ``services.json``."""

    services: dict[ServiceName, ServiceRecord] = {}


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One line of ``noetl-dagster services status``."""

    name: ServiceName
    running: bool
    url: str
    pid: int | None
    log: Path


Announce = Callable[[Sequence[ServiceName]], None]
"""Called with the services that are started now, before the wait until they answer."""


def start(settings: Settings, names: Iterable[ServiceName], announce: Announce | None = None) -> dict[str, str]:
    """Starts the services that are not running, and returns the settings that lead to them.

    Each service is started once, even if several processes call this at the same time. Services start in parallel.

    Raises:
        ServiceError: a service does not start; the message contains the end of its log.
    """
    home = settings.home.resolve()
    with _locked(home):
        state = read_state(home)
        wanted = [service(name, settings, state) for name in names]
        absent = [one for one in wanted if not _is_up(one, state.services.get(one.name))]
        if absent and announce is not None:
            announce([one.name for one in absent])
        for one in absent:
            _launch(one, home, state)
            _write_state(home, state)  # at once, so that ``down`` finds the process whatever happens next
        for one in wanted:
            if not state.services[one.name].ready:
                _await_ready(one, home, state)
    addresses: dict[str, str] = {}
    for one in wanted:
        addresses |= one.addresses(state.services[one.name].ports)
    return addresses


def down(settings: Settings) -> None:
    """Stops every embedded service of the state folder. Data and ports are kept for the next start."""
    home = settings.home.resolve()
    with _locked(home):
        state = read_state(home)
        for name, record in state.services.items():  # one after another, since a process that exits starts no threads
            _end(service(name, settings, state), record)
        stopped = {"pid": None, "started": "", "ready": False}
        records = {name: record.model_copy(update=stopped) for name, record in state.services.items()}
        _write_state(home, ServicesFile(services=records))


def status(settings: Settings) -> list[ServiceStatus]:
    """Returns the status of every embedded service. Starts nothing and waits for nothing."""
    home = settings.home.resolve()
    state = read_state(home)
    statuses = []
    for name in _SERVICES:
        record = state.services.get(name)
        running = record is not None and record.ready and _is_up(service(name, settings, state), record)
        url, pid = (record.url, record.pid if running else None) if record else ("", None)
        statuses.append(ServiceStatus(name, running, url, pid, home / name / "log"))
    return statuses


def running(settings: Settings, name: ServiceName) -> dict[str, str]:
    """Returns the settings that lead to a service; none if it does not run. Starts nothing."""
    state = read_state(settings.home.resolve())
    one, record = service(name, settings, state), state.services.get(name)
    return one.addresses(record.ports) if record is not None and record.ready and _is_up(one, record) else {}


def names_missing(settings: Settings, only: Collection[str] | None) -> list[ServiceName]:
    """Returns the services that have no address in the settings, restricted to ``only`` if given."""
    unknown = sorted(set(only or ()) - set(ServiceName))
    if unknown:
        names = ", ".join(sorted(ServiceName))
        raise ServiceError(f"no embedded service {', '.join(unknown)}; there are {names}")
    missing = {
        ServiceName.POSTGRES: settings.db_url is None or settings.dagster_db_url is None,
        ServiceName.NATS: settings.nats_url is None,
        ServiceName.OBJECT_STORE: settings.minio_endpoint is None,
        ServiceName.RECORDS_API: only is not None,
    }
    return [name for name, is_missing in missing.items() if is_missing and (only is None or name in only)]


def service(name: ServiceName, settings: Settings, state: ServicesFile) -> Service:
    """Returns a service with its recorded secrets."""
    record = state.services.get(name)
    return _SERVICES[name](settings, {} if record is None else record.secrets)


def read_state(home: Path) -> ServicesFile:
    """Reads the state file; an absent file is empty."""
    path = home / "services.json"
    return ServicesFile.model_validate_json(path.read_bytes()) if path.exists() else ServicesFile()


def _write_state(home: Path, state: ServicesFile) -> None:
    write_private(home / "services.json", state.model_dump_json(indent=2))


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Locks the state folder against every other process and thread."""
    try:
        private_folder(home)
        handle = os.fdopen(private_file(str(home / "services.lock"), os.O_WRONLY | os.O_CREAT), "w")
    except OSError as error:
        raise ServiceError(
            f"the state folder {home} cannot be used: {error}; set NOETL_HOME to another folder"
        ) from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_up(one: Service, record: ServiceRecord | None) -> bool:
    """Returns True if the recorded process still exists with these secrets, and listens unless it is starting."""
    if record is None or not _lives(record) or record.secrets != one.secrets:
        return False
    return not record.ready or processes.answers(record.ports[one.listeners[0]])


def _lives(record: ServiceRecord) -> bool:
    return record.pid is not None and processes.start_mark(record.pid) == record.started


def _launch(one: Service, home: Path, state: ServicesFile) -> None:
    folder = home / one.name
    closed_folder(folder)
    record = state.services.get(one.name)
    if record is not None:
        _end(one, record)  # it may be alive without answering
        if record.pid is not None:
            processes.await_reaped(record.pid)
    ports = _ports(one, record, state)
    log = folder / "log"
    log.unlink(missing_ok=True)
    pid = processes.spawn(one.prepare(folder, ports), log, folder)
    mark = processes.start_mark(pid) or ""
    state.services[one.name] = ServiceRecord(
        ports=ports, pid=pid, started=mark, url=one.url(ports), secrets=one.secrets
    )


def _ports(one: Service, record: ServiceRecord | None, state: ServicesFile) -> dict[str, int]:
    """Returns the recorded ports, or new ones at the first start or if another program has taken one."""
    recorded = dict(record.ports) if record is not None else {}
    if set(recorded) == set(one.listeners) and processes.become_free(recorded.values(), patience=2.0):
        return recorded
    taken = {port for service_record in state.services.values() for port in service_record.ports.values()}
    return dict(zip(one.listeners, processes.free_ports(len(one.listeners), taken), strict=True))


def _await_ready(one: Service, home: Path, state: ServicesFile) -> None:
    """Waits until a service serves requests. If another program took its port first, it is started again."""
    deadline, launches = time.monotonic() + one.start_patience, 1
    while not one.ready((record := state.services[one.name]).ports):
        if not _lives(record):
            log = (home / one.name / "log").read_text(errors="replace")
            if launches == MOST_LAUNCHES or PORT_TAKEN not in log.lower():
                raise _failure(one, "ended while starting", home)
            launches += 1
            _launch(one, home, state)
            _write_state(home, state)
        if time.monotonic() > deadline:
            raise _failure(one, f"is not ready after {one.start_patience:.0f} s", home)
        time.sleep(0.05)
    one.furnish(record.ports)
    state.services[one.name] = record.model_copy(update={"ready": True})
    _write_state(home, state)


def _end(one: Service, record: ServiceRecord) -> None:
    if record.pid is not None:
        processes.end(record.pid, record.started, one.stop_signal, one.stop_patience)


def _failure(one: Service, what: str, home: Path) -> ServiceError:
    log = home / one.name / "log"
    return ServiceError(
        f"embedded {one.name} {what}. Fix the problem that its log reports and try again, or set the address of your "
        f"own server (noetl-dagster services env names the settings).\n{log}:\n{processes.tail(log)}"
    )
