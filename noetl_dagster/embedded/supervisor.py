"""Starts the embedded services, restarts those that died, and stops them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from noetl_dagster.embedded import processes
from noetl_dagster.embedded.postgres import Postgres
from noetl_dagster.embedded.servers import Nats, ObjectStore, RecordsApi, Service
from noetl_dagster.embedded.state import (
    ServiceName,
    ServiceRecord,
    ServicesFile,
    locked,
    read_state,
    write_state,
)
from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings

_STOPPED = {"pid": None, "started": "", "ready": False}


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One line of ``noetl-dagster services status``."""

    name: ServiceName
    running: bool
    url: str
    pid: int | None
    log: Path


def service(name: ServiceName, settings: Settings) -> Service:
    """Returns the service of a name, configured by the settings."""
    match name:
        case ServiceName.POSTGRES:
            return Postgres()
        case ServiceName.NATS:
            return Nats()
        case ServiceName.OBJECT_STORE:
            return ObjectStore(settings)
        case ServiceName.RECORDS_API:
            return RecordsApi(settings)


def start(settings: Settings, names: Iterable[ServiceName]) -> dict[ServiceName, ServiceRecord]:
    """Starts the services that are not running, and returns the records of all of them.

    Each service is started once, even if several processes call this at the same time. Services start in parallel.

    Raises:
        ServiceError: a service does not start; the message contains the end of its log.
    """
    home = settings.home.resolve()
    wanted = [service(name, settings) for name in names]
    with locked(home):
        state = read_state(home)
        for one in wanted:
            if not _is_up(one, state.services.get(one.name)):
                state = _launch(one, home, state)
                write_state(
                    home, state
                )  # write now, so that ``stop`` finds the process whatever happens next
        for one in wanted:
            record = state.services[one.name]
            if not record.ready:
                _await_ready(one, home, record)
                state = state.with_record(one.name, record.model_copy(update={"ready": True}))
                write_state(home, state)
    return {one.name: state.services[one.name] for one in wanted}


def stop(settings: Settings) -> None:
    """Stops every embedded service of the state folder. Data and ports are kept for the next start."""
    home = settings.home.resolve()
    with locked(home):
        state = read_state(home)
        for name, record in reversed(state.services.items()):
            _end(service(name, settings), record)
            state = state.with_record(name, record.model_copy(update=_STOPPED))
        write_state(home, state)


def inspect(settings: Settings) -> list[ServiceStatus]:
    """Returns the status of every embedded service. Starts nothing and waits for nothing."""
    home = settings.home.resolve()
    records = read_state(home).services
    found = []
    for name in ServiceName:
        record = records.get(name)
        running = record is not None and record.ready and _is_up(service(name, settings), record)
        found.append(
            ServiceStatus(
                name=name,
                running=running,
                url=record.url if record else "",
                pid=record.pid if record and running else None,
                log=_folder(home, name) / "log",
            )
        )
    return found


def _is_up(one: Service, record: ServiceRecord | None) -> bool:
    """Returns True if the recorded process still exists, and listens unless it is starting."""
    if record is None or not _lives(record) or one.fixed_port not in (0, record.ports[one.front]):
        return False
    return not record.ready or processes.answers(record.ports[one.front])


def _lives(record: ServiceRecord) -> bool:
    return record.pid is not None and processes.start_mark(record.pid) == record.started


def _launch(one: Service, home: Path, state: ServicesFile) -> ServicesFile:
    folder = _folder(home, one.name)
    folder.mkdir(parents=True, exist_ok=True)
    record = state.services.get(one.name)
    if record is not None:
        _end(one, record)  # it may be alive without answering
    ports = _ports(one, record, state)
    log = folder / "log"
    log.unlink(missing_ok=True)
    process = processes.spawn(one.prepare(folder, ports), log, folder)
    fresh = ServiceRecord(
        ports=ports,
        pid=process.pid,
        started=processes.start_mark(process.pid) or "",
        url=one.url(ports),
    )
    return state.with_record(one.name, fresh)


def _ports(one: Service, record: ServiceRecord | None, state: ServicesFile) -> dict[str, int]:
    """Returns the recorded ports, or new ones at the first start or if another program has taken one."""
    recorded = record.ports if record is not None else {}
    if one.fixed_port:
        recorded = {**recorded, one.front: one.fixed_port}
    if set(recorded) == set(one.listeners):
        if processes.become_free(recorded.values(), patience=2.0):
            return recorded
        if one.fixed_port:
            raise ServiceError(
                f"port {one.fixed_port} of the embedded {one.name} is taken by another program; "
                "end that program or set another port"
            )
    ports = processes.free_ports(len(one.listeners), state.taken_ports())
    return dict(zip(one.listeners, ports, strict=True))


def _await_ready(one: Service, home: Path, record: ServiceRecord) -> None:
    log = _folder(home, one.name) / "log"
    deadline = time.monotonic() + one.start_patience
    while not one.ready(record.ports):
        if not _lives(record):
            raise ServiceError(_failure(one, "ended while starting", log))
        if time.monotonic() > deadline:
            raise ServiceError(_failure(one, f"is not ready after {one.start_patience:.0f} s", log))
        time.sleep(0.05)
    one.furnish(record.ports)


def _end(one: Service, record: ServiceRecord) -> None:
    if record.pid is not None:
        processes.end(record.pid, record.started, one.stop_signal, one.stop_patience)


def _failure(one: Service, what: str, log: Path) -> str:
    return (
        f"embedded {one.name} {what}. Fix the problem that its log reports and try again, or set the address of your "
        f"own server (noetl-dagster services env names the settings).\n{log}:\n{processes.tail(log)}"
    )


def _folder(home: Path, name: ServiceName) -> Path:
    return home / name.value


def names_missing(settings: Settings, only: Collection[str] | None) -> list[ServiceName]:
    """Returns the services that have no address in the settings, restricted to ``only`` if given.

    Raises:
        ServiceError: ``only`` names a service that does not exist.
    """
    known = {name.value for name in ServiceName}
    unknown = sorted(set(only or ()) - known)
    if unknown:
        raise ServiceError(f"no embedded service {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    missing = {
        ServiceName.POSTGRES: settings.db_url is None or settings.dagster_db_url is None,
        ServiceName.NATS: settings.nats_url is None,
        ServiceName.OBJECT_STORE: settings.minio_endpoint is None,
        ServiceName.RECORDS_API: only is not None,
    }
    return [name for name, is_missing in missing.items() if is_missing and (only is None or name in only)]
