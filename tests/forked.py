"""Programs in processes that are forked from one that has imported them: importing takes longer than most commands.

The process that forks is multiprocessing's fork server, one for each process of pytest. It has one thread and runs
nothing but imports. The run servers and code servers that forked programs start are forked too. Programs that the
tests start with ``sys.executable`` import for themselves, and so does what those start.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import IO, Any

import dagster._grpc.server
import orjson
import psutil

from noetl_dagster.launcher import server
from noetl_dagster.launcher.address import Address
from noetl_dagster.process.environment import own_environment
from noetl_dagster.process.forking import Channel, ForkServer, Message, serve_forks
from noetl_dagster.settings import get_settings
from tests.waiting import PROCESS_SECONDS, until_now

MAINS = {
    "create-dagster": "create_dagster.cli:main",
    "dagster": "dagster._cli:main",
    "dagster-graphql": "dagster_graphql.cli:main",
    "dg": "dagster_dg_cli.cli:main",
    "noetl-dagster": "noetl_dagster.cli:main",
    "run-server": "noetl_dagster.launcher.server:main",
}
"""The function of each program that its console script calls."""

MODULES = {"dagster": "dagster", "noetl_dagster": "noetl-dagster"}
"""The program that ``python -m`` with a module is too."""

IMPORTED = [
    "create_dagster.cli",
    "dagster_dg_cli.cli.check",
    "dagster_dg_cli.cli.launch",
    "dagster_dg_cli.cli.list",
    "dagster_dg_cli.cli.scaffold",
    "dagster._cli.definitions",
    "dagster._cli.job",
    "noetl_dagster.cli.commands.authoring",
    "noetl_dagster.cli.commands.check",
    "noetl_dagster.cli.commands.executions",
    "noetl_dagster.cli.commands.provision",
    "noetl_dagster.cli.commands.run",
    "noetl_dagster.cli.commands.serve",
    "noetl_dagster.cli.commands.upkeep",
    "noetl_dagster.cli.commands.processes",
    "noetl_dagster.engine.helper",
    "noetl_dagster.pool_worker.worker",
    "noetl_dagster.service.app",
    "duckdb",
    "pandas",
    "psycopg2",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "upath",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    *server.IMPORTED,
]


class Forked:
    """A program in a process and a session of its own, with what tests use of :class:`subprocess.Popen`.

    Its command line, for those who look from outside, is that of the process that forks.

    Args:
        program: one of ``MAINS``, or ``-c`` with code as its first argument.
        output: file to whose end it writes, or an open descriptor.
        errors: where it writes what goes to its standard error; ``output`` by default.
    """

    stdout: IO[str] | None = None
    """What it writes, if :func:`start` was asked for a pipe."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        environment: Mapping[str, str],
        folder: Path,
        output: Path | int,
        errors: Path | int | None = None,
    ) -> None:
        given = [_handed_over(one) for one in (output, output if errors is None else errors)]
        self._process = process(environment, _become, program, arguments, folder, *given)
        self._asking = Lock()  # only the first who reads the exit code finds it
        with _inherited_fork_server():
            self._process.start()
        multiprocessing.process._children.discard(self._process)  # else pytest waits for it before it ends

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._asking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Returns what it wrote since the last time, and waits for its end."""
        if self.stdout is None or self.stdout.closed:
            self.wait(timeout)
            return "", None
        with self.stdout as written, ThreadPoolExecutor(1) as reading:
            text = reading.submit(written.read)
            self.wait(timeout)
            return text.result(timeout), None

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills it with the processes that it has started in its session, and waits for its end."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no session yet
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def start_run_server(address: Address) -> Channel:
    """Starts a run server, in the place of ``Address._start``."""
    Forked(
        *("run-server", str(address.folder), address.key, str(address.runs_at_once)),
        environment=address.environment,
        folder=Path.cwd(),
        output=address.log,
    )
    return until_now(address.connect, "a run server that listens")


def start_code_server(command: list[str], *, cwd: str | None, env: Mapping[str, str] | None) -> Forked:
    """Starts a code server, in the place of the function by which Dagster starts one."""
    assert command[1:3] == ["-m", "dagster"]
    environment = os.environ if env is None else env
    return Forked("dagster", *command[3:], environment=environment, folder=Path(cwd or "."), output=1, errors=2)


def fork_servers(replace: Callable[[object, str, Any], None] = setattr) -> None:
    """Has this process fork the run servers and code servers that it starts."""
    replace(Address, "_start", start_run_server)
    replace(dagster._grpc.server, "open_ipc_subprocess", start_code_server)


def fork_helpers(replace: Callable[[object, str, Any], None] = setattr) -> None:
    """Has this process fork the preloaded processes of its engines' helpers."""
    replace(ForkServer, "__init__", _preload)


def _preload(forks: Any, module: str, options: Message) -> None:
    forks._control, theirs = socket.socketpair()
    lifeline, forks._lifeline = os.pipe()
    with theirs, Connection(lifeline) as read_end:
        preloaded = process(own_environment(), _serve, module, orjson.dumps(options), theirs, read_end)
        preloaded.start()
    forks._process = SimpleNamespace(poll=lambda: preloaded.exitcode, wait=preloaded.join)


def _serve(module: str, options: bytes, control: socket.socket, lifeline: Connection) -> None:
    sys.argv = [module, str(control.detach()), str(lifeline.fileno())]
    sys.stdin = io.TextIOWrapper(io.BytesIO(options))
    serve_forks(import_module(module).prepare)


def end_forks() -> None:
    """Kills the fork server of this process, and what it has forked: some would wait forever for databases of tests."""
    with suppress(psutil.NoSuchProcess):
        if _server._forkserver_pid is not None:
            server = psutil.Process(_server._forkserver_pid)
            for one in [server, *server.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def process(environment: Mapping[str, str], target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Returns a process that calls a function of a module in an environment, once it is started."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(IMPORTED)
    return forks.Process(target=_call, args=(dict(environment), target, arguments))


def result_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a module in a process of its own, and returns what it returns.

    Tracing every call takes minutes in a process that has run thousands of tests.
    """
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = process(os.environ, _send_result, sending, function, arguments)
    with _inherited_fork_server():
        child.start()
    sending.close()
    with receiving:
        try:
            return receiving.recv()
        except EOFError:
            child.join()
            raise AssertionError(f"{function.__name__} ended with exit code {child.exitcode}; see its output") from None


def _send_result(sending: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sending.send(function(*arguments))


def run(
    program: str, *arguments: str, environment: Mapping[str, str], folder: Path, texts: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end.

    Args:
        folder: in which it works.
        texts: folder for what it writes.

    Raises:
        subprocess.TimeoutExpired: it does not end.
    """
    output, errors = texts / "stdout.txt", texts / "stderr.txt"
    for path in (output, errors):
        path.unlink(missing_ok=True)
    process = Forked(program, *arguments, environment=environment, folder=folder, output=output, errors=errors)
    try:
        code = process.wait(PROCESS_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise subprocess.TimeoutExpired(
            [program, *arguments], PROCESS_SECONDS, output.read_bytes(), errors.read_bytes()
        ) from None
    return subprocess.CompletedProcess([program, *arguments], code, output.read_text(), errors.read_text())


def start(
    arguments: list[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    stdout: IO[Any] | int | None = None,
    forks: bool = True,
    **options: Any,
) -> Forked | subprocess.Popen[Any]:
    """Starts a command in a session of its own, with its errors in its output; code and modules of ``MODULES`` are forked.

    Args:
        forks: False for a process whose own command line matters.
        options: of a :class:`subprocess.Popen` that cannot be forked.
    """
    program = _program(arguments)
    if program is None or not forks or options.keys() - {"text"}:
        options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(arguments, env=env, cwd=cwd, stdout=stdout, **options)
    readable, writable = os.pipe() if stdout == subprocess.PIPE else (None, None)
    given = writable if writable is not None else 1 if stdout is None else stdout
    process = Forked(
        program,
        *arguments[2 if program == "-c" else 3 :],
        environment=os.environ if env is None else env,
        folder=Path(cwd or "."),
        output=given if isinstance(given, int) else given.fileno(),
    )
    if readable is not None and writable is not None:
        os.close(writable)
        process.stdout = os.fdopen(readable, "r", errors="replace")
    return process


def _program(arguments: list[str]) -> str | None:
    """Returns the program that a command line of Python starts; None if it is not forked."""
    if arguments[0] != sys.executable:
        return None
    return "-c" if arguments[1] == "-c" else MODULES.get(arguments[2]) if arguments[1] == "-m" else None


def _call(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    get_settings.cache_clear()
    target(*arguments)


def _handed_over(output: Path | int) -> Path | Connection:
    return output if isinstance(output, Path) else Connection(os.dup(output))  # multiprocessing passes it on


def _become(
    program: str,
    arguments: tuple[str, ...],
    folder: Path,
    output: Path | Connection,
    errors: Path | Connection,
) -> None:
    """Makes this process what the program's console script would be."""
    os.setsid()
    for descriptor, file in ((1, output), (2, errors)):
        if isinstance(file, Connection):
            os.dup2(file.fileno(), descriptor)
        else:
            with file.open("ab") as opened:
                os.dup2(opened.fileno(), descriptor)
    for file in (output, errors):
        if isinstance(file, Connection):
            file.close()
    os.chdir(folder)
    global _forks_of_forks
    _forks_of_forks = (_server._forkserver_address, _server._forkserver_alive_fd)
    fork_servers()
    script = str(Path(sys.executable).with_name(program))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(Path(script).parent), *map(os.path.abspath, given)]  # as Python begins a script
    if program == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = [script, *arguments]
    module, function = MAINS[program].split(":")
    getattr(import_module(module), function)()


_server: Any = multiprocessing.forkserver._forkserver
_forks_of_forks: tuple[str, int] | None = None
"""In a forked process: address and descriptor of the fork server that has forked it."""

_forking = Lock()


@contextmanager
def _inherited_fork_server() -> Iterator[None]:
    """Has a forked process use the fork server that has forked it; by itself, Python would start another."""
    if _forks_of_forks is None:
        yield
        return
    with _forking:
        own = (_server._forkserver_address, _server._forkserver_alive_fd)
        _server._forkserver_address, _server._forkserver_alive_fd = _forks_of_forks
        _server.ensure_running = lambda: None
        try:
            yield
        finally:
            del _server.ensure_running
            _server._forkserver_address, _server._forkserver_alive_fd = own
