"""``NOETL_WARM_COMMANDS``: a forked command is what it would be without a server."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from noetl_dagster import embedded
from noetl_dagster.cli.client import MOST_SERVERS
from noetl_dagster.process.unix_sockets import listen
from noetl_dagster.settings import Settings
from tests.forked import run
from tests.launcher.conftest import GATED
from tests.processes import killed_in_the_end
from tests.waiting import PROCESS_SECONDS, ended, until_now

Start = Callable[..., subprocess.Popen[str]]

COMMAND = [sys.executable, "-m", "noetl_dagster"]
SCRIPT = str(Path(sys.executable).with_name("noetl-dagster"))


def serve_commands(settings: Settings, folder: Path) -> dict[str, str]:
    """Starts a command server; gives the environment of its clients."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    environment = {**inherited, **embedded.environment(settings), "NOETL_WARM_COMMANDS": "true"}
    first = subprocess.run([*COMMAND, "executions"], env=environment, cwd=folder, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr  # without a server, which it starts
    until_now(lambda: server(settings), "the command server to serve")
    return environment


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the shared server's clients, whose runs share a run server."""
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def environment(module_settings: Settings, clients: Path) -> dict[str, str]:
    """The environment of a command server that the tests share."""
    return serve_commands(module_settings, clients)


@pytest.fixture
def own_environment(settings: Settings, tmp_path: Path) -> dict[str, str]:
    """The environment of a command server that the test may end."""
    return serve_commands(settings, tmp_path)


def server(settings: Settings) -> psutil.Process | None:
    """The process that listens in the state folder."""
    folder = settings.home / "commands"
    if not list(folder.glob("*.sock")):
        return None
    alike = [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or ())]
    return min(alike, key=lambda one: one.create_time())  # those that it has forked have the same command line


@contextmanager
def starting(environment: dict[str, str], clients: Path, folder: Path) -> Iterator[Start]:
    """Starts clients, with their output and their errors in a file; what they run may end afterwards."""
    (clients / "gated.yaml").write_text(GATED)
    with killed_in_the_end() as started:

        def start(*arguments: str) -> subprocess.Popen[str]:
            return started(
                [*COMMAND, *arguments],
                env=environment,
                cwd=clients,
                stdout=(folder / "output").open("w"),
                # a shell that runs the tests in the background has interrupts ignored
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

        yield start
    (folder / "open").touch()


@pytest.fixture
def start(environment: dict[str, str], clients: Path, tmp_path: Path) -> Iterator[Start]:
    with starting(environment, clients, tmp_path) as start:
        yield start


def forked(settings: Settings) -> psutil.Process:
    """The process of the only command that runs."""
    found = server(settings)
    assert found is not None

    def running() -> list[psutil.Process]:
        return [one for one in found.children() if not ended(one.pid)]

    [command] = until_now(running, "the command to be forked")
    return command


def test_a_forked_command_is_what_it_would_be(
    environment: dict[str, str], module_settings: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "broken.yaml").write_text("kind: Playbook\nworkflow: 1\n")
    (folder / "good.yaml").write_text(GATED)
    warm = environment | {"COLUMNS": "70"}  # the server has another width
    usual = warm | {"NOETL_WARM_COMMANDS": "false"}
    for arguments in (
        ["check", "broken.yaml"],
        ["check", "good.yaml"],
        ["check", "missing.yaml"],
        ["check", "--nonsense"],
        ["status", "1"],
        ["executions", "--json"],
        ["run", "good.yaml", "--set", "nonsense"],
    ):
        served = subprocess.run([SCRIPT, *arguments], env=warm, cwd=folder, capture_output=True, text=True)
        alone = run("noetl-dagster", *arguments, environment=usual, folder=folder, texts=tmp_path)
        assert (served.returncode, served.stdout, served.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    for arguments in (["check", "broken.yaml"], ["check", "--nonsense"]):
        assert shown_on_terminal(arguments, warm, folder) == shown_on_terminal(arguments, usual, folder)
    assert next((module_settings.home / "commands").glob("*.log")).read_text() == ""


def shown_on_terminal(arguments: list[str], environment: dict[str, str], folder: Path) -> bytes:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([SCRIPT, *arguments], env=environment, cwd=folder, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the other side is closed
        while more := os.read(ours, 4096):
            shown += more
    os.close(ours)
    process.wait(PROCESS_SECONDS)
    return shown


def begun(folder: Path) -> int:
    """The process that drives the gated run."""
    path = folder / "one.begun"
    return int(until_now(lambda: path.exists() and path.read_text(), "the run to begin"))


def start_run(start: Start, folder: Path) -> subprocess.Popen[str]:
    return start("run", "gated.yaml", "--json", "--set", f"gate={folder}", "--set", "name=one")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_command(
    start: Start, module_settings: Settings, tmp_path: Path, number: signal.Signals
) -> None:
    client = start_run(start, tmp_path)
    driver = begun(tmp_path)
    command = forked(module_settings)
    client.send_signal(number)
    assert client.wait(PROCESS_SECONDS) == 1
    assert '"status": "RUNNING"' in (tmp_path / "output").read_text()
    until_now(lambda: ended(driver), "the interrupted driver to end")
    assert ended(command.pid)


@pytest.mark.parametrize("killed", ["client", "command"])
def test_a_client_and_its_command_end_together(
    start: Start, module_settings: Settings, tmp_path: Path, killed: str
) -> None:
    client = start_run(start, tmp_path)
    begun(tmp_path)
    command = forked(module_settings)
    os.kill(client.pid if killed == "client" else command.pid, signal.SIGKILL)
    assert client.wait(PROCESS_SECONDS) == -signal.SIGKILL
    until_now(lambda: ended(command.pid), "the command to end")


def test_a_command_outlives_its_server(own_environment: dict[str, str], settings: Settings, tmp_path: Path) -> None:
    with starting(own_environment, tmp_path, tmp_path) as start:
        client = start_run(start, tmp_path)
        begun(tmp_path)
        found = server(settings)
        assert found is not None
        found.kill()
        (tmp_path / "open").touch()
        assert client.wait(PROCESS_SECONDS) == 1
    shown = (tmp_path / "output").read_text()
    assert '"status": "COMPLETED"' in shown
    assert "the command server was killed: the exit code of process" in shown


def test_a_stopped_client_stops_its_command(start: Start, module_settings: Settings, tmp_path: Path) -> None:
    """As Ctrl-Z does, until the shell continues the client."""
    client = start_run(start, tmp_path)
    begun(tmp_path)
    command = forked(module_settings)
    client.send_signal(signal.SIGTSTP)
    until_now(lambda: command.status() == psutil.STATUS_STOPPED, "the command to stop")
    until_now(lambda: psutil.Process(client.pid).status() == psutil.STATUS_STOPPED, "the client to stop")
    (tmp_path / "open").touch()
    client.send_signal(signal.SIGCONT)
    assert client.wait(PROCESS_SECONDS) == 0


@pytest.mark.parametrize("arguments", ["good.yaml <&-", "<(cat good.yaml)"])
def test_a_command_that_needs_its_own_descriptors_takes_no_server(
    environment: dict[str, str], tmp_path: Path, arguments: str
) -> None:
    (tmp_path / "good.yaml").write_text(GATED)
    commands = [
        ["bash", "-c", f"{' '.join(COMMAND)} check {arguments}"],
        ["bash", "-c", f"NOETL_WARM_COMMANDS=false {' '.join(COMMAND)} check {arguments}"],
    ]
    warm, usual = (subprocess.run(one, env=environment, cwd=tmp_path, capture_output=True) for one in commands)
    assert (warm.returncode, warm.stderr) == (usual.returncode, usual.stderr)


def test_a_client_hides_its_environment(environment: dict[str, str], tmp_path: Path) -> None:
    """As other commands do: it has the credentials of the settings."""
    code = (
        "import ctypes, sys; from noetl_dagster.cli.client import forward; code = forward();"
        "print('dumpable', ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), 'code', code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "executions", "--json"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "dumpable 0 code 0" in done.stdout


def test_a_server_imports_nothing_from_the_folder_of_its_first_client(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('shadowed')")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    environment = {**inherited, **embedded.environment(settings), "NOETL_WARM_COMMANDS": "true"}
    first = subprocess.run([SCRIPT, "executions"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    until_now(lambda: server(settings), "the command server to serve")


def test_no_more_servers_than_a_few_are_started(
    own_environment: dict[str, str], settings: Settings, tmp_path: Path
) -> None:
    folder = settings.home / "commands"
    others = [listen(str(folder / f"{number}.sock")) for number in range(MOST_SERVERS - 1)]
    before = sorted(folder.iterdir())
    other = {**own_environment, "A_VARIABLE": "of another environment"}

    def run_command() -> None:
        done = subprocess.run([*COMMAND, "executions"], env=other, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    run_command()
    assert sorted(folder.iterdir()) == before
    for listener in others:
        listener.close()  # as a killed server leaves its socket
    run_command()
    until_now(lambda: len(list(folder.glob("*.sock"))) == MOST_SERVERS + 1, "another server to serve")


def test_one_server_serves_and_ends_with_the_services(
    own_environment: dict[str, str], settings: Settings, tmp_path: Path
) -> None:
    first = server(settings)
    assert first is not None
    [socket] = (settings.home / "commands").glob("*.sock")
    second = subprocess.run(
        [sys.executable, "-m", "noetl_dagster.cli.command_server", str(socket)],
        env=own_environment,
        timeout=PROCESS_SECONDS,
    )
    assert second.returncode == 0
    assert server(settings) == first
    subprocess.run([*COMMAND, "services", "down"], env=own_environment, cwd=tmp_path, check=True)
    assert not socket.parent.exists()
    until_now(lambda: ended(first.pid), "the server to end")
