"""A live display of a running execution, read from the event log by a separate thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from noetl_dagster.cli.console import note, notes, warn
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.overview import (
    ChunksView,
    LoopView,
    Overview,
    chunks_made,
    loop_notes,
    overview,
)
from noetl_dagster.engine.executions.progress import running_notes
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.process.event_loop import run_sync

POLL_SECONDS = 0.5
PLAIN_SECONDS = 10.0


@contextmanager
def showing(engine: Engine, execution_id: int, *, quiet: bool = False) -> Iterator[None]:
    """Shows the steps and the counts of the loops until the block ends.

    A terminal gets bars; a pipe gets a line whenever a step changes, and every ten seconds.
    """
    if quiet:
        yield
        return
    ended = threading.Event()
    with _display() as display:

        def refresh() -> None:
            while not ended.wait(POLL_SECONDS):
                display.refresh(engine, execution_id)

        thread = threading.Thread(target=refresh, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            display.refresh(engine, execution_id)


def watch(engine: Engine, execution_id: int, *, quiet: bool = False) -> None:
    """Shows the same until the execution has ended, whatever process runs it.

    A short outage of the database only delays it. It reports once that no process runs the execution.
    """
    away = lonely = False
    checked_at = time.monotonic()
    with _Display() if quiet else _display() as display:
        while True:
            try:
                execution = display.refresh(engine, execution_id)
                if execution is not None and execution.status != ExecutionStatus.RUNNING:
                    return
                if not lonely and time.monotonic() - checked_at >= PLAIN_SECONDS:
                    checked_at = time.monotonic()
                    lonely = not run_sync(engine.liveness.is_driven(execution_id))
                    if lonely:
                        note(f"no process runs it now; to resume it: noetl-dagster resume {execution_id}")
                away = False
            except DATABASE_AWAY as error:
                if not away:
                    warn(f"the event log cannot be read now: {error}")
                away = True
            time.sleep(POLL_SECONDS)


def _display() -> _Display:
    return _ProgressBars() if notes.is_terminal else _ProgressLines()


class _Display:
    """Reads the state of an execution; a subclass shows it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def refresh(self, engine: Engine, execution_id: int) -> Overview | None:
        """Reads and shows the execution, and returns it; None if it is not in the log yet."""
        try:
            execution = run_sync(overview(engine.runtime, execution_id))
            is_running = any(step.status == "RUNNING" for step in execution.steps)
            self.show(execution, run_sync(running_notes(engine.runtime.pool, execution_id)) if is_running else {})
        except ExecutionNotFoundError:
            return None
        return execution

    def show(self, execution: Overview, commands: Mapping[str, str]) -> None:
        """Shows the steps, and the latest note of a running command of each step."""


def loop_text(loop: LoopView | None, chunks: ChunksView | None = None) -> str:
    """Formats the counts of a loop, and what else is known of it: ``7/20, 1 failed, 2.5/s, 5 s left``."""
    counts = ""
    if loop is not None and loop.so_far is not None:
        counts = f"{loop.done} of {loop.so_far} so far"
    elif loop is not None:
        counts = f"{loop.done}/{loop.total}" if loop.total or loop.done == loop.failed == 0 else str(loop.done)
    return ", ".join(filter(None, [counts, *_step_notes(loop, chunks)]))


def _step_notes(loop: LoopView | None, chunks: ChunksView | None) -> list[str]:
    made = [] if chunks is None else [chunks_made(chunks)]
    return made if loop is None else [*made, *loop_notes(loop)]


class _ProgressBars(_Display):
    """Shows a bar for each step: iterations of a loop, or running and done."""

    def __enter__(self) -> Self:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=notes,
        )
        self._progress.start()
        self._whole = self._progress.add_task("[bold]whole", total=1, note="")
        self._tasks: dict[str, TaskID] = {}
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def show(self, execution: Overview, commands: Mapping[str, str]) -> None:
        ended = sum(step.status != "RUNNING" for step in execution.steps)
        self._progress.update(self._whole, completed=ended, total=len(execution.steps))
        for step in execution.steps:
            task = self._tasks.get(step.step)
            if task is None:
                task = self._tasks[step.step] = self._progress.add_task(step.step, total=1, note="")
            total, done = 1, int(step.status != "RUNNING")
            if (loop := step.loop) is not None:
                total, done = loop.total or loop.so_far or 0, loop.done + loop.failed
            parts = [*_step_notes(loop, step.chunks), commands.get(step.step, "")]
            if step.status == "FAILED":
                parts.append("FAILED")
            self._progress.update(task, total=max(total, 1), completed=done, note=", ".join(filter(None, parts)))
            if step.status != "RUNNING":
                self._progress.stop_task(task)


class _ProgressLines(_Display):
    """Prints a line for each change, for logs."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}
        self._at: dict[str, float] = {}

    def show(self, execution: Overview, commands: Mapping[str, str]) -> None:
        now = time.monotonic()
        for step in execution.steps:
            due = now - self._at.get(step.step, 0.0) >= PLAIN_SECONDS and step.status == "RUNNING"
            if self._shown.get(step.step) == step.status and not due:
                continue
            self._shown[step.step], self._at[step.step] = step.status, now
            parts = [step.status.lower(), loop_text(step.loop, step.chunks), commands.get(step.step, "")]
            note(f"{execution.seconds:7.1f} s  {step.step}: {' '.join(filter(None, parts))}")
