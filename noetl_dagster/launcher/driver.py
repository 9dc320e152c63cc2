"""The driver: a process forked from the run server, with everything imported, that drives one run after another.

A run has the process to itself: interrupting or killing the process affects one run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from types import FrameType

import psutil
from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

# private: executes a launched run, as the command 'dagster api execute_run' does
from dagster._cli.api import _execute_run_command_body

# private: a run that is interrupted reports it
from dagster._utils.interrupts import capture_interrupts

from noetl_dagster.code_location.launch import PreparedJob, launch, prepare
from noetl_dagster.compiler.executors.storages import keep_connections
from noetl_dagster.compiler.runs import RESUME_EPOCH_TAG, reason_against_resuming
from noetl_dagster.errors import NoetlError
from noetl_dagster.launcher import compute_logs
from noetl_dagster.launcher.address import (
    LAUNCHER_TAG,
    PRIORITY_TAG,
    Address,
    RunLock,
    driver_of,
    priority_of,
)
from noetl_dagster.playbook.catalog import names_version
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.process.forking import Channel, Message
from noetl_dagster.resources.engines import EngineProvider, close_engines

logger = logging.getLogger(__name__)

MOST_RUNS = 200
"""Runs after which a driver is replaced, since their leftovers in the process add up."""

MOST_GROWTH_BYTES = 256 * 1024**2
"""A driver that has grown by more is replaced after its run."""

STALE_SECONDS = 5.0
"""Seconds after which idle connections are tested before they are used."""

HEAVY = ("pyspark", "duckdb")
"""Packages that leave servers or thread pools in a process: a driver ends after a run that loads one."""


class Driver:
    """Takes requests from the run server until that is gone, or until this process must be replaced."""

    def __init__(self, channel: Channel, address: Address) -> None:
        self._channel = channel
        self._address = address
        self._folder = address.folder / "runs"
        self._noetl = EngineProvider()
        self._stack = ExitStack()
        self._prepared: dict[tuple[str, bool], PreparedJob] = {}
        self._lock: RunLock | None = None
        self._environment = dict(os.environ)
        self._working_directory = Path.cwd()
        self._memory = psutil.Process().memory_info().rss
        self._not_loaded = [name for name in HEAVY if name not in sys.modules]
        self._runs = 0
        self._used = time.monotonic()
        self._interrupted = False

    def main(self) -> None:
        """Serves until the end of the process."""
        signal.signal(signal.SIGUSR1, self._on_interrupt)
        compute_logs.mirrored = False  # this process has no terminal
        try:
            self._noetl.engine()
            if "DAGSTER_HOME" in os.environ:
                self._instance.get_run_by_id("none")
            self._channel.send({"ready": True})  # with the connections that a run needs
            self._serve()
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            close_engines()
            self._stack.close()

    def _serve(self) -> None:
        while (message := self._channel.receive()) is not None:
            if message["do"] == "end":
                return
            if not self._is_fit():
                self._channel.send({"unfit": True})
                return
            answer = self._answer(message)
            needs_replacement = self._needs_replacement()
            try:
                self._channel.send({"answer": answer, "needs_replacement": needs_replacement})
            except OSError:
                break
            if needs_replacement:
                return
        # the server was killed: the runs that waited there must not wait for the next launch
        if self._answer({"do": "recover", "id": "recover"}).get("runs"):
            with suppress(NoetlError):
                self._address.open().close()

    def _answer(self, message: Message) -> Message:
        try:
            match message["do"]:
                case "run":
                    return self._locked(message["id"], self._execute_run, message)
                case "execute":
                    return self._locked(message["run_id"], self._launch, message)
                case "report_lost":
                    return self._report_lost(message)
                case _:
                    return self._recover()
        except Exception as error:
            logger.exception("%s", {name: message[name] for name in ("do", "id") if name in message})
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._reset()

    def _locked(self, run_id: str, work: Callable[[Message], Message], message: Message) -> Message:
        lock = RunLock.take(self._folder, run_id)
        if lock is None:
            return {}  # a driver of an earlier server drives it
        try:
            self._lock = lock
            if lock.is_interrupted:  # the signal came before this process held the lock
                raise KeyboardInterrupt
            return work(message)
        finally:
            self._interrupted = lock.is_interrupted
            self._lock = None
            lock.release()

    def _execute_run(self, message: Message) -> Message:
        """Drives a run that Dagster has launched, as ``dagster api execute_run`` does."""
        with capture_interrupts():  # the events are in Dagster's log already
            _execute_run_command_body(message["id"], self._instance, lambda event: None, set_exit_code_on_failure=False)
        return {}

    def _launch(self, message: Message) -> Message:
        """Drives an execution that is in the log and has no run yet."""
        try:
            prepared = self._prepare(message["file"], lenient=message["lenient"])
            tags = {LAUNCHER_TAG: self._address.key}
            if message["epoch"] is not None:
                if reason := self._reason_against_resuming(int(message["id"]), prepared):
                    logger.info("execution %s is not resumed: %s", message["id"], reason)
                    return {}
                tags[RESUME_EPOCH_TAG] = str(message["epoch"])
            if message["priority"]:
                tags[PRIORITY_TAG] = str(message["priority"])
            with capture_interrupts():
                launched = launch(
                    prepared,
                    self._noetl,
                    self._instance,
                    execution_id=int(message["id"]),
                    workload=message["workload"],
                    resumed=message["resumed"],
                    tags=tags,
                    run_id=message["run_id"],
                )
        except NoetlError as error:
            return {"error": str(error)}
        return {"error": launched.error} if launched.error else {}

    def _reason_against_resuming(self, execution_id: int, prepared: PreparedJob) -> str | None:
        """Returns why recovery leaves an execution to its latest run, if it does."""
        name = prepared.plan.playbook.name
        return run_sync(reason_against_resuming(self._noetl.engine(), self._instance, execution_id, name))

    def _report_lost(self, message: Message) -> Message:
        """Reports a run whose process ended without a report as failed or canceled."""
        instance = self._instance
        run = instance.get_run_by_id(message["id"])
        if run is None or run.is_finished or driver_of(self._folder, run.run_id) is not None:
            return {}
        if run.status is DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, message=message["why"])
        else:
            instance.report_run_failed(run, message["why"])
        return {}

    def _recover(self) -> Message:
        """Returns the runs that an earlier server with this key received and that no process has started."""
        if "DAGSTER_HOME" not in os.environ:
            return {"runs": []}
        wanted = RunsFilter(statuses=[DagsterRunStatus.STARTING], tags={LAUNCHER_TAG: self._address.key})
        runs = self._instance.get_runs(wanted, ascending=True)
        free = [run for run in runs if driver_of(self._folder, run.run_id) is None]
        return {"runs": [[run.run_id, priority_of(run.tags)] for run in free]}

    @cached_property
    def _instance(self) -> DagsterInstance:
        """The instance of ``DAGSTER_HOME``, with pooled connections."""
        instance = self._stack.enter_context(DagsterInstance.get())
        keep_connections(instance)
        return instance

    def _prepare(self, file: str, *, lenient: bool) -> PreparedJob:
        """Returns the job of a playbook, compiled once for each version of its file; a registered one has no file."""
        if names_version(file) and not Path(file).is_file():
            playbook = run_sync(self._noetl.engine().runtime.registered.load(file, lenient=lenient))
        else:
            playbook = load_playbook(file, lenient=lenient)
        key = (file, playbook.lenient)
        prepared = self._prepared.get(key)
        if prepared is None or prepared.plan.playbook.source != playbook.source or playbook.settled:
            prepared = self._prepared[key] = prepare(playbook, self._noetl)
        return prepared

    def _reset(self) -> None:
        """Restores the process for the next run."""
        self._runs += 1
        self._used = time.monotonic()
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        os.chdir(self._working_directory)
        run_sync(self._noetl.engine().liveness.release_all())

    def _is_fit(self) -> bool:
        """Reports whether the connections still work, if they have been idle for a while."""
        if time.monotonic() - self._used < STALE_SECONDS:
            return True
        try:
            run_sync(self._noetl.engine().runtime.pool.fetchval("SELECT 1"), timeout=STALE_SECONDS)
            if "_instance" in vars(self):
                self._instance.get_run_by_id("none")
        except Exception as error:
            logger.info("a driver with broken connections ends: %r", error)
            return False
        return True

    def _needs_replacement(self) -> bool:
        grown = psutil.Process().memory_info().rss - self._memory
        loaded = any(name in sys.modules for name in self._not_loaded)
        return self._interrupted or self._runs >= MOST_RUNS or grown > MOST_GROWTH_BYTES or loaded

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Interrupts the run if it is still the one that the signal is for."""
        if self._lock is not None and self._lock.is_interrupted:
            signal.raise_signal(signal.SIGINT)
