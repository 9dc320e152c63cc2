"""Child processes of playbook code: another user, limits, a time limit, and a maximum of stored output."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.process import confining
from noetl_dagster.process.families import MARK, Family
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


UNCONFINED = Confinement()


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
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
_NO_TEXT = re.compile("[\0\udc80-\udcff]")  # NUL, and bytes that are no UTF-8


class Output:
    """What a process writes to a stream: all of it, or the last ``OUTPUT_BYTES``."""

    def __init__(self) -> None:
        self._last = bytearray()
        self._size = 0

    def add(self, data: bytes) -> None:
        """Adds what the process has written next."""
        self._size += len(data)
        self._last += data
        if len(self._last) > 2 * OUTPUT_BYTES:
            del self._last[: -OUTPUT_BYTES - LONGEST]

    @property
    def is_cut(self) -> bool:
        """Reports that only the end is kept."""
        return self._size > OUTPUT_BYTES

    @property
    def fault(self) -> str | None:
        """The line and the byte because of which the output is no text; None if it is text."""
        content = self._decoded()
        if (invalid := _NO_TEXT.search(content)) is None:
            return None
        return f"line {content.count(chr(10), 0, invalid.start()) + 1} has the byte 0x{ord(invalid[0]) & 0xFF:02x}"

    def __str__(self) -> str:
        """Returns the text, without secrets. A first line in brackets tells what is left out and what is replaced."""
        notes = []
        if self.is_cut:
            notes.append(f"the first {self._size - OUTPUT_BYTES:,} bytes are left out; write long output to a file")
        if self.fault is not None:
            notes.append(f"{self.fault}: bytes that are no UTF-8 text are replaced with U+FFFD")
        text = _NO_TEXT.sub("\ufffd", self._decoded())
        return f"[{'; '.join(notes)}]\n{text}" if notes else text

    def _decoded(self) -> str:
        content = SECRETS.redact_bytes(bytes(self._last))
        if self.is_cut:
            content = content[-OUTPUT_BYTES:].lstrip(_CONTINUATION)
        return content.decode(errors="surrogateescape")


class ProcessRun(asyncio.SubprocessProtocol):
    """What a process has written, and its exit code once it has ended. Its output may be open for longer."""

    exit_code = 0

    def __init__(self) -> None:
        self.stdout, self.stderr = Output(), Output()
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keeps what the process has written."""
        (self.stdout if fd == 1 else self.stderr).add(data)

    def process_exited(self) -> None:
        """Lets the caller see the end of the process, whoever still has its pipes."""
        self.exited.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Lets the caller see the end of the output."""
        self.closed.set()


async def run_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: str | Path = ".",
    pass_fds: Sequence[int] = (),
    confined: Confinement = UNCONFINED,
) -> ProcessRun:
    """Runs a command to its end. All processes that it started end with it.

    If the caller is cancelled (a time limit), they get SIGTERM and, two seconds later, SIGKILL. What is left when the
    command has ended by itself gets SIGKILL at once. Output is read two seconds longer, at most.

    Args:
        env: the variables of the program; it inherits none.
        pass_fds: open files that the program inherits, under the same numbers.

    Raises:
        OSError: the program cannot be started.
    """
    family = Family()
    command, env = confined.start_of(command, {**env, MARK: family.mark})
    starting = asyncio.ensure_future(
        asyncio.get_running_loop().subprocess_exec(
            ProcessRun,
            *command,
            cwd=folder,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    )
    cancelled: asyncio.CancelledError | None = None
    try:
        transport, run = await asyncio.shield(starting)
    except asyncio.CancelledError as error:  # asyncio would end the process alone, and wait for its group
        cancelled, (transport, run) = error, await starting
    try:
        if cancelled is not None:
            raise cancelled
        await run.exited.wait()
    finally:
        try:
            patience = GRACE_SECONDS if transport.get_returncode() is None else 0
            await asyncio.shield(family.end(transport.get_pid(), patience))
            with suppress(TimeoutError):  # a process that hides from the search may keep them open
                await asyncio.wait_for(run.closed.wait(), GRACE_SECONDS)
        finally:
            transport.close()
    run.exit_code = transport.get_returncode() or 0
    return run
