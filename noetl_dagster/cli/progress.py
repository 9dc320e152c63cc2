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
from noetl_dagster.engine.executions.overview import LoopView, Overview, StepView, chunks_made, overview
from noetl_dagster.engine.executions.progress import duration, per_second, running_notes
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

    def describe(self, step: StepView, commands: Mapping[str, str]) -> str:
        """Describes a step beyond its counts: chunks, failures, pace, the note of its command."""
        loop, running = step.loop, step.status == "RUNNING"
        parts = [
            chunks_made(step.chunks) if step.chunks is not None else "",
            f"{loop.failed} failed" if loop is not None and loop.failed else "",
            _pace(loop) if loop is not None and running else "",
            commands.get(step.step, "") if running else "",
        ]
        return "".join(f" {part}" for part in parts if part)


def _pace(loop: LoopView) -> str:
    """Returns the pace of a loop and its remaining time, or what the loop waits for."""
    if loop.waiting:
        return "waiting"
    if 0 < loop.total <= loop.done + loop.failed:
        return "gathering results"
    if not loop.rate:
        return ""
    left = "" if loop.remaining_seconds is None else f", {duration(loop.remaining_seconds)} left"
    return f"{per_second(loop.rate)}{left}"


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
            text = self.describe(step, commands) + (" FAILED" if step.status == "FAILED" else "")
            self._progress.update(task, total=max(total, 1), completed=done, note=text)
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
            text = self.describe(step, commands)
            due = now - self._at.get(step.step, 0.0) >= PLAIN_SECONDS and step.status == "RUNNING"
            if self._shown.get(step.step) == step.status and not due:
                continue
            self._shown[step.step], self._at[step.step] = step.status, now
            counts = f" {_counted(step.loop)}" if step.loop is not None else ""
            note(f"{execution.seconds:7.1f} s  {step.step}: {step.status.lower()}{counts}{text}")


def _counted(loop: LoopView) -> str:
    ended = loop.done + loop.failed
    if loop.so_far is not None:
        return f"{ended} of {loop.so_far} so far"
    return f"{ended}/{loop.total}" if loop.total else str(ended)
