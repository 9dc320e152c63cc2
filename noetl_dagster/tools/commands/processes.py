"""Child processes with limits: their own process group, a time limit, and a maximum of stored output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from noetl_dagster.process.redaction import LONGEST, SECRETS

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
