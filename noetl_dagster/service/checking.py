"""Checks the playbooks of clients in processes of their own, which have limits of time and memory.

A text that exceeds a limit, or crashes a parser, ends such a process and not the API. The next request gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from noetl_dagster.errors import Place, PlaybookError, Problem, ProblemKind, ServiceError
from noetl_dagster.events.catalog import PlaybookDraft, draft_of
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.environment import basic_environment
from noetl_dagster.process.forking import MOST_BYTES, Message
from noetl_dagster.settings import Settings

PROCESSES = 2
"""Processes at most. They start with the first request that needs them, and stay."""

_PATIENCE = 3
"""Wall-clock time on a busy machine, as a multiple of the processor time."""


class PlaybookChecker:
    """Asks checking processes; requests wait while all of them work."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(PROCESSES)
        self._idle: list[asyncio.subprocess.Process] = []

    async def draft(self, content: str, *, lenient: bool = False) -> PlaybookDraft:
        """Returns a text ready for registration, as :func:`draft_of` does.

        Raises:
            PlaybookError: the text is invalid, or exceeds a limit.
        """
        answer = await self._ask({"content": content, "lenient": lenient}, "<playbook>")
        return PlaybookDraft(**answer["draft"])

    async def check(self, playbook: Playbook, workload: Mapping[str, Any]) -> None:
        """Checks the settings of a playbook that depend on its workload.

        Raises:
            PlaybookError: a setting is invalid with this workload, or exceeds a limit.
        """
        if playbook.settled:
            effective = {**playbook.workload, **workload}
            request = {"content": playbook.source, "file": playbook.file, "lenient": playbook.lenient}
            await self._ask({**request, "workload": effective}, playbook.file)

    async def close(self) -> None:
        """Ends the processes."""
        for process in self._idle:
            await _end(process)
        self._idle.clear()

    async def _ask(self, request: Message, file: str) -> Message:
        async with self._slots:
            process = self._idle.pop() if self._idle else await self._started()
            answer: Message | None = None
            try:
                async with asyncio.timeout(_PATIENCE * self._settings.check_seconds):
                    answer = await _exchanged(process, request)
            except TimeoutError:
                raise self._refused(file, signal.SIGPROF) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                raise self._refused(file, -await process.wait()) from None
            finally:
                if answer is None or "memory" in answer:
                    await _end(process)
                else:
                    self._idle.append(process)
        if "memory" in answer:
            raise self._refused(file, None)
        if "problems" in answer:
            raise PlaybookError([_problem(one) for one in answer["problems"]])
        return answer

    async def _started(self) -> asyncio.subprocess.Process:
        settings = self._settings
        environment = {**basic_environment(), "NOETL_PLAYBOOK_BYTES": str(settings.playbook_bytes)}  # and no secrets
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, str(settings.check_seconds), str(settings.check_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MOST_BYTES,
            env=environment,
        )
        try:
            await _exchanged(process, None)  # it is ready; only then time counts
        except (asyncio.IncompleteReadError, ConnectionError):
            await _end(process)
            raise ServiceError("the process that checks playbooks does not start; see the log of the API") from None
        except BaseException:
            await _end(process)
            raise
        return process

    def _refused(self, file: str, ended_by: int | None) -> PlaybookError:
        settings = self._settings
        if ended_by == signal.SIGPROF:
            reason = f"checking it takes more than {settings.check_seconds:g} seconds of processor time"
            limit = "NOETL_CHECK_SECONDS"
        else:
            reason = f"checking it takes more than {settings.check_bytes:,} bytes of memory"
            limit = "NOETL_CHECK_BYTES"
            if ended_by is not None and ended_by != signal.SIGKILL:
                reason = f"{reason}, or ends its process ({signal.Signals(ended_by).name if ended_by > 0 else 'exit'})"
        message = f"{reason}; make it smaller, or compute in a step (limit: {limit})"
        return PlaybookError([Problem(Place(file, 1), message)])


async def _exchanged(process: asyncio.subprocess.Process, request: Message | None) -> Message:
    assert process.stdin is not None
    assert process.stdout is not None
    if request is not None:
        process.stdin.write(_line(request))
        await process.stdin.drain()
    answer: Message = json.loads(await process.stdout.readuntil())
    return answer


def _line(message: Message) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _problem(fields: Message) -> Problem:
    return Problem(**fields | {"place": Place(**fields["place"]), "kind": ProblemKind(fields["kind"])})


def _answer(request: Message) -> Message:
    """Checks one playbook, in the checking process."""
    try:
        if "workload" in request:
            parse_playbook(request.pop("content"), **request)
            return {}
        return {"draft": draft_of(**request)._asdict()}
    except PlaybookError as error:
        return {"problems": [asdict(problem) for problem in error.problems]}
    except MemoryError:
        return {"memory": True}


def main(seconds: float, size: int) -> None:
    """Answers requests until the API ends. Exceeding the processor time of a request ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the API
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    answer: Message = {}
    while True:
        answers.write(_line(answer))
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not (request := sys.stdin.buffer.readline()):
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, also inside of a call in C
        answer = _answer(json.loads(request))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
