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
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Lock

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
    "noetl_dagster.cli.commands.run",
    "noetl_dagster.cli.commands.upkeep",
    *server.IMPORTED,
]


class Forked:
    """A program in a process and a session of its own, with what tests use of :class:`subprocess.Popen`.

    Its command line, for those who look from outside, is that of the process that forks.

    Args:
        program: one of ``MAINS``.
        output: file to whose end it writes.
        errors: file to whose end it writes what goes to its standard error; that of ``output`` by default.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        environment: Mapping[str, str],
        folder: Path,
        output: Path,
        errors: Path | None = None,
    ) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(IMPORTED)
        given = (program, arguments, dict(environment), folder, output, errors or output)
        self._process: ForkServerProcess = forks.Process(target=_become, args=given)
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
            TimeoutError: it has not ended by then.
        """
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout} seconds")
        return code

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
    process = Forked(
        program, *arguments, environment=environment, folder=folder, output=output, errors=errors
    )
    try:
        code = process.wait(PROCESS_SECONDS)
    except TimeoutError:
        process.kill()
        raise subprocess.TimeoutExpired(
            [program, *arguments], PROCESS_SECONDS, output.read_bytes(), errors.read_bytes()
        ) from None
    return subprocess.CompletedProcess([program, *arguments], code, output.read_text(), errors.read_text())


def _become(
    program: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    folder: Path,
    output: Path,
    errors: Path,
) -> None:
    """Makes this process what the program's console script would be."""
    os.setsid()
    for descriptor, file in ((1, output), (2, errors)):
        with file.open("ab") as opened:
            os.dup2(opened.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    script = str(Path(sys.executable).with_name(program))
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(Path(script).parent), *map(os.path.abspath, given)]  # as Python begins a script
    sys.argv = [script, *arguments]
    get_settings.cache_clear()
    module, function = MAINS[program].split(":")
    getattr(import_module(module), function)()
