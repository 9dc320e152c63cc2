"""Child processes of playbook code: another user, limits, a time limit, and a maximum of stored output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.process import confining
from noetl_dagster.process.redaction import LONGEST, SECRETS
from noetl_dagster.settings import Settings


@dataclass(frozen=True, slots=True)
class Confinement:
    """Rules for one process, see :func:`noetl_dagster.process.confining.enter`."""

    user: tuple[int, int] | None = None
    limits: dict[str, int] = field(default_factory=dict)

    @property
    def has_own_user(self) -> bool:
        """Reports that a process cannot use the home folder and the temporary folder of this process."""
        return self.user is not None

    def rules(self) -> dict[str, Any]:
        """Returns the rules as JSON values."""
        return asdict(self)

    def start_of(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Returns command and environment of a process that confines itself and becomes ``command`` with ``env``."""
        if self.user is None and not self.limits:
            return list(command), dict(env)
        own = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        passed = {f"{confining.PREFIX}{name}": value for name, value in env.items()}
        start = [sys.executable, "-I", "-S", confining.__file__, json.dumps(self.rules()), *command]
        return start, {**own, **passed}

    def variables(self, private: Path | None) -> dict[str, str]:
        """Returns variables that name the folders which the process may write."""
        return {"HOME": str(private), "TMPDIR": str(private)} if self.has_own_user else {}

    @contextmanager
    def private_folder(self, prefix: str) -> Iterator[Path]:
        """Makes a temporary folder that belongs to the user of the process, and removes it at the end."""
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            if self.user is not None:
                os.chown(folder, *self.user)
            yield folder
        finally:
            # TemporaryDirectory would change modes through links that the process has made
            shutil.rmtree(folder, ignore_errors=True)


def confinement(settings: Settings, memory: int | None = None) -> Confinement:
    """Returns the rules for playbook code.

    Args:
        memory: of the task, in bytes. The smaller limit applies.

    Raises:
        ToolError: of kind ``schema``; there is no such user, or this process may not change its user.
    """
    sizes = [size for size in (memory, settings.playbook_memory_bytes) if size is not None]
    limits = {
        "RLIMIT_AS": min(sizes, default=None),
        "RLIMIT_CPU": None if settings.playbook_seconds is None else int(settings.playbook_seconds) + 1,
        "RLIMIT_NPROC": settings.playbook_processes,
    }
    limited = {name: limit for name, limit in limits.items() if limit is not None}
    return Confinement(None if settings.playbook_user is None else _user(settings.playbook_user), limited)


def _user(name: str) -> tuple[int, int]:
    if os.geteuid() != 0:
        raise ToolError(f"NOETL_PLAYBOOK_USER={name} needs a service that runs as root; leave it empty", kind="schema")
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        ids = entry.pw_uid, entry.pw_gid
    except KeyError:
        if not name.isdecimal():
            raise ToolError(f"NOETL_PLAYBOOK_USER={name}: there is no such user", kind="schema") from None
        ids = int(name), int(name)
    if 0 in ids:
        raise ToolError(f"NOETL_PLAYBOOK_USER={name} is root, or of its group; name another user", kind="schema")
    return ids


OUTPUT_BYTES = 1_048_576
GRACE_SECONDS = 2.0
_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a process. Long output is reduced to its end, and ``truncated`` is set."""

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool = False


async def run_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: str | Path = ".",
    pass_fds: Sequence[int] = (),
) -> Finished:
    """Runs a command to its end.

    If the caller is cancelled (a time limit), the whole process group gets SIGTERM and, two seconds later, SIGKILL.
    Processes that the command left in its group end with it.

    Args:
        env: the variables of the program; it inherits none.
        pass_fds: open files that the program inherits, under the same numbers.

    Raises:
        OSError: the program cannot be started.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    )
    cancelled: asyncio.CancelledError | None = None
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError as error:  # asyncio would end the process alone, and wait for its group
        cancelled, process = error, await starting
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = _Tail(), _Tail()
    reading = asyncio.gather(output.read(process.stdout), errors.read(process.stderr), return_exceptions=True)
    try:
        if cancelled is not None:
            raise cancelled
        await process.wait()
    finally:
        await asyncio.shield(_end_group(process))
        await reading
    assert process.returncode is not None
    return Finished(process.returncode, output.text(), errors.text(), output.truncated or errors.truncated)


class _Tail:
    """Reads a stream to its end and keeps the last ``OUTPUT_BYTES``."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self.truncated = False

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_CHUNK):
            self._kept += chunk
            if len(self._kept) > 2 * OUTPUT_BYTES:
                self._cut()

    def _cut(self) -> None:
        if len(self._kept) > OUTPUT_BYTES:
            del self._kept[: -OUTPUT_BYTES - LONGEST]
            self.truncated = True

    def text(self) -> str:
        self._cut()
        if not self.truncated:
            return self._kept.decode(errors="replace")
        return SECRETS.redact_bytes(bytes(self._kept))[-OUTPUT_BYTES:].decode(errors="replace")


async def _end_group(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_SECONDS)
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
