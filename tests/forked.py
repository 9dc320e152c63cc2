"""Programs in processes that are forked from one that has imported them: importing takes longer than most commands.

The process that forks is multiprocessing's fork server, one for each process of pytest. It has one thread and runs
nothing but imports. Programs that the tests start with ``sys.executable`` import for themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Lock
from typing import IO, Any

from noetl_dagster.launcher import server
from noetl_dagster.settings import get_settings
from tests.waiting import PROCESS_SECONDS

MAINS = {
    "create-dagster": "create_dagster.cli:main",
    "dagster": "dagster._cli:main",
    "dagster-graphql": "dagster_graphql.cli:main",
    "dg": "dagster_dg_cli.cli:main",
    "noetl-dagster": "noetl_dagster.cli:main",
    "run-server": "noetl_dagster.launcher.server:main",
}
"""The function of each program that its console script calls."""

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
    "noetl_dagster.cli.commands.ingest",
    "noetl_dagster.cli.commands.provision",
    "noetl_dagster.cli.commands.run",
    "noetl_dagster.cli.commands.serve",
    "noetl_dagster.cli.commands.upkeep",
    "noetl_dagster.cli.commands.worker",
    "noetl_dagster.pool_worker.worker",
    "noetl_dagster.service.app",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    *server.IMPORTED,
]


class Forked:
    """A program in a process and a session of its own, with what tests use of :class:`subprocess.Popen`.

    Its command line, for those who look from outside, is that of the process that forks.

    Args:
        program: one of ``MAINS``.
        output: file to whose end it writes, or an open descriptor.
        errors: file to whose end it writes what goes to its standard error; that of ``output`` by default.
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
        errors: Path | None = None,
    ) -> None:
        if isinstance(output, int):
            output = Connection(os.dup(output))  # which multiprocessing hands over
        self._process = process(environment, _become, program, arguments, folder, output, errors or output)
        self._asking = Lock()  # only the first who reads the exit code finds it
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
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


def process(environment: Mapping[str, str], target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Returns a process that calls a function of a module in an environment, once it is started."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(IMPORTED)
    return forks.Process(target=_call, args=(dict(environment), target, arguments))


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
    """Starts a command in a session of its own, with its errors in its output; ``noetl-dagster`` is forked.

    Args:
        forks: False for a process whose own command line matters.
        options: of a :class:`subprocess.Popen` that cannot be forked.
    """
    ours = arguments[:3] == [sys.executable, "-m", "noetl_dagster"]
    if not ours or not forks or options.keys() - {"text"}:
        options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(arguments, env=env, cwd=cwd, stdout=stdout, **options)
    readable, writable = os.pipe() if stdout == subprocess.PIPE else (None, None)
    given = writable if writable is not None else 1 if stdout is None else stdout
    process = Forked(
        "noetl-dagster",
        *arguments[3:],
        environment=os.environ if env is None else env,
        folder=Path(cwd or "."),
        output=given if isinstance(given, int) else given.fileno(),
    )
    if readable is not None and writable is not None:
        os.close(writable)
        process.stdout = os.fdopen(readable, "r", errors="replace")
    return process


def _call(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    get_settings.cache_clear()
    target(*arguments)


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
    if isinstance(output, Connection):
        output.close()
    os.chdir(folder)
    script = str(Path(sys.executable).with_name(program))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(Path(script).parent), *map(os.path.abspath, given)]  # as Python begins a script
    sys.argv = [script, *arguments]
    module, function = MAINS[program].split(":")
    getattr(import_module(module), function)()
