"""One execution of a flow: a command drives it, and others resume it when that has ended too early."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any

import psycopg2

from tests.chaos.flows import Flow
from tests.chaos.machine import Machine, Process
from tests.chaos.state import EndState, end_state

PATIENCE_SECONDS = 180.0
"""For a run to complete after its last fault: far more than any lease, report or retry."""

MOST_RESUMES = 40
PAUSE_SECONDS = 0.3
"""Between the end of a command and the next: the sessions of a killed one end in the database."""

STARTED = """
SELECT execution_id FROM noetl.event
WHERE event_type = 'playbook.initialized' AND parent_execution_id IS NULL
"""
NEWEST = "SELECT coalesce(max(event_id), 0), count(*) FROM noetl.event WHERE execution_id = %s"
LATEST = """
SELECT event_type FROM noetl.event WHERE execution_id = %s AND event_type IN
    ('playbook.initialized', 'execution.resumed', 'playbook.completed', 'playbook.failed', 'execution.cancelled')
ORDER BY event_id DESC LIMIT 1
"""


class Run:
    """An execution of a flow on a machine.

    Attributes:
        resumes: commands that a supervisor started because the previous one had not ended with success.
    """

    def __init__(self, machine: Machine, flow: Flow, number: int) -> None:
        self.machine = machine
        self.flow = flow
        self.resumes = 0
        self._name = f"run {number}"
        self._table = f"target_{number}"
        self._folder = machine.folder / self._table
        self._folder.mkdir()
        self._file = machine.folder / f"{flow.name}.yaml"
        self._file.write_text(flow.text.replace("TARGET", self._table).replace("FOLDER", str(self._folder)))
        for path in flow.beside:
            shutil.copy(path, machine.folder)
        if flow.prepare:
            machine.query(flow.prepare.replace("TARGET", self._table))
        self._earlier = set(machine.query(STARTED))
        self._id: int | None = None
        self._driver: Process | None = None
        self._is_complete = False
        self._started = 0.0

    def start(self) -> None:
        self._started = time.monotonic()
        self._driver = self._command("run", str(self._file), *self.flow.options, "--json")

    @property
    def execution_id(self) -> int:
        found = self._find()
        assert found is not None, f"no execution has started: {self.said}"
        return found

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def said(self) -> str:
        return self.machine.output(self._name)

    def driver(self) -> int | None:
        return None if self._driver is None or self._driver.poll() is not None else self._driver.pid

    def is_over(self) -> bool:
        """Whether the execution is complete; starts another command if one has ended before, as a supervisor would."""
        if self._is_complete or self._driver is None or (code := self._driver.poll()) is None:
            return self._is_complete
        self.machine.end(self._driver)
        if code == 0:
            self._is_complete = True
        else:
            self._go_on()
        return self._is_complete

    def until_over(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.is_over():
            assert time.monotonic() < deadline, f"it has not ended {PATIENCE_SECONDS:.0f} s after the last fault"
            time.sleep(0.02)

    def events(self) -> tuple[int, int]:
        """The newest event, 0 before the first, and their number."""
        newest, count = self.machine.query(NEWEST, self._find() or 0)[0]
        return int(newest), int(count)

    def state(self) -> EndState:
        rows: list[tuple[Any, ...]] = []
        if self.flow.found is not None:
            rows = self.flow.found(self.machine, self._table, self._folder)
        return asyncio.run(end_state(self.machine.direct, self.execution_id, rows, per_item=self.flow.per_item))

    def end(self) -> None:
        if self._driver is not None:
            self.machine.end(self._driver)

    def _find(self) -> int | None:
        if self._id is None:
            found = set(self.machine.query(STARTED)) - self._earlier
            self._id = int(found.pop()[0]) if found else None
        return self._id

    def _go_on(self) -> None:
        time.sleep(PAUSE_SECONDS)
        try:
            execution_id = self._find()
            latest = None if execution_id is None else self.machine.query(LATEST, execution_id)[0][0]
        except psycopg2.OperationalError:  # the next look finds out
            return
        if latest == "playbook.completed":  # the command was killed after that
            self._is_complete = True
            return
        self.resumes += 1
        assert self.resumes < MOST_RESUMES, f"resumed {self.resumes} times"
        if latest is None:  # it was killed before the first event
            self._driver = self._command("run", str(self._file), *self.flow.options, "--json")
        else:
            self._driver = self._command("resume", str(execution_id), "--json")

    def _command(self, *arguments: str) -> Process:
        has_clock = not self.flow.starts_jvm
        return self.machine.command(self._name, *arguments, has_clock=has_clock, **self.flow.settings)
