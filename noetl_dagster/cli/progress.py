"""A live display of a running execution, read from the event log by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from noetl_dagster.cli.console import notes
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.estimate import Estimate, past_of
from noetl_dagster.engine.executions.overview import LoopView, Overview, StepView, chunks_made, overview
from noetl_dagster.engine.executions.progress import Pace, duration, running_notes
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.process.event_loop import run_sync

POLL_SECONDS = 0.5
PLAIN_SECONDS = 10.0


@contextmanager
def showing(engine: Engine, execution_id: int, *, quiet: bool = False) -> Iterator[None]:
    """Shows the steps and the counts of the loops until the block ends.

    A terminal gets bars; a pipe gets a line whenever a step ends, and every ten seconds.
    """
    if quiet:
        yield
        return
    display = _ProgressBars() if notes.is_terminal else _ProgressLines()
    ended, left = threading.Event(), _Left(engine, execution_id)

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            _refresh(engine, execution_id, display, left)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    with display:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            _refresh(engine, execution_id, display, left)


class _Left:
    """The estimated time that the execution still takes, once its past runs have been read."""

    def __init__(self, engine: Engine, execution_id: int) -> None:
        self._engine = engine
        self._execution_id = execution_id
        self._estimate: Estimate | None = None

    def describe(self, found: Overview) -> str:
        if self._estimate is None:
            self._estimate = Estimate(run_sync(past_of(self._engine.runtime.pool, self._execution_id)))
        seconds = self._estimate.remaining(found, time.monotonic())
        return "" if seconds is None else f"about {duration(seconds)} left"


def _ended(found: Overview) -> int:
    return sum(step.status != "RUNNING" for step in found.steps)


def _refresh(
    engine: Engine, execution_id: int, display: _ProgressBars | _ProgressLines, left: _Left | None = None
) -> None:
    try:
        found = run_sync(overview(engine.runtime, execution_id))
        running = any(step.status == "RUNNING" for step in found.steps)
        said = run_sync(running_notes(engine.runtime.pool, execution_id)) if running else {}
        display.update(found, said, left.describe(found) if running and left is not None else "")
    except ExecutionNotFoundError:
        return


class _ProgressBars:
    """One bar a step: iterations of a loop, or running and done."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=notes,
        )
        self._tasks: dict[str, TaskID] = {}
        self._paces = Paces()

    def __enter__(self) -> _ProgressBars:
        self._progress.start()
        self._whole = self._progress.add_task("[bold]whole", total=1, note="")
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def update(self, found: Overview, said: Mapping[str, str], left: str) -> None:
        self._progress.update(self._whole, completed=_ended(found), total=len(found.steps), note=left)
        for step in found.steps:
            task = self._tasks.get(step.step)
            if task is None:
                task = self._tasks[step.step] = self._progress.add_task(step.step, total=1, note="")
            total, done = _counts(step)
            self._progress.update(
                task, total=max(total, 1), completed=done, note=_note(step, self._paces, said)
            )
            if step.status != "RUNNING":
                self._progress.stop_task(task)


class _ProgressLines:
    """One line a change, for logs."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}
        self._at: dict[str, float] = {}
        self._paces = Paces()

    def __enter__(self) -> _ProgressLines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, found: Overview, said: Mapping[str, str], left: str) -> None:
        now = time.monotonic()
        if left and now - self._at.setdefault("", now) >= PLAIN_SECONDS:
            self._at[""] = now
            notes.print(f"{found.seconds:7.1f} s  whole: {left}", markup=False, highlight=False)
        for step in found.steps:
            note = _note(step, self._paces, said).removesuffix(" FAILED")  # the state says so already
            due = now - self._at.get(step.step, 0.0) >= PLAIN_SECONDS and step.status == "RUNNING"
            if self._shown.get(step.step) == step.status and not due:
                continue
            self._shown[step.step], self._at[step.step] = step.status, now
            counts = f" {_counted(step.loop)}" if step.loop is not None else ""
            notes.print(
                f"{found.seconds:7.1f} s  {step.step}: {step.status.lower()}{counts}{note}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _counts(step: StepView) -> tuple[int, int]:
    if step.loop is not None:
        return step.loop.total or step.loop.so_far or 0, step.loop.done + step.loop.failed
    return 1, int(step.status != "RUNNING")


def _counted(loop: LoopView) -> str:
    ended = loop.done + loop.failed
    if loop.so_far is not None:
        return f"{ended} of {loop.so_far} so far"
    return f"{ended}/{loop.total}" if loop.total else str(ended)


class Paces:
    """The speed of each running loop, from one poll to the next."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}

    def describe(self, loop: LoopView) -> str:
        """Returns the pace of a loop, or what it waits for."""
        if loop.waiting:
            return "waiting"
        if 0 < loop.total <= loop.done + loop.failed:
            return "gathering results"
        pace = self._paces.setdefault(loop.loop_id, Pace())
        pace.see(loop.done + loop.failed, time.monotonic())
        return pace.describe(loop.total)


def _note(step: StepView, paces: Paces, said: Mapping[str, str]) -> str:
    parts = []
    if step.chunks is not None:
        parts.append(chunks_made(step.chunks))
    if step.loop is not None:
        parts.append(f"{step.loop.failed} failed" if step.loop.failed else "")
        parts.append(paces.describe(step.loop) if step.status == "RUNNING" else "")
    parts.append(said.get(step.step, "") if step.status == "RUNNING" else "")
    parts.append("FAILED" if step.status == "FAILED" else "")
    return "".join(f" {part}" for part in parts if part)
