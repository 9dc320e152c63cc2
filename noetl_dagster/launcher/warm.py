"""Dagster's run launcher over a run server: runs start in preloaded processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dagster import DagsterRun, DagsterRunStatus, DefaultRunLauncher, Field, IntSource, StringSource

# private: the interface of launchers
from dagster._core.launcher.base import CheckRunHealthResult, LaunchRunContext, WorkerStatus

from noetl_dagster.compiler.names import LOCATION
from noetl_dagster.errors import ServiceError
from noetl_dagster.launcher.address import (
    LAUNCHER_TAG,
    Address,
    driver_of,
    interrupt,
    priority_of,
)
from noetl_dagster.process.forking import Message

logger = logging.getLogger(__name__)

BEGIN_SECONDS = 15.0
"""Seconds after which a driver has started a run that it received."""


class WarmRunLauncher(DefaultRunLauncher):
    """Hands the runs of playbooks to a run server of this machine, which drives a bounded number at once.

    Runs of other code locations, and all runs while no server starts, take Dagster's default way: from the code
    location's own server. So do runs of an instance without ``DAGSTER_HOME``, which a driver could not open.

    ``dagster.yaml``:

    .. code-block:: yaml

        run_launcher:
          module: noetl_dagster.launcher.warm
          class: WarmRunLauncher
          config: {folder: /srv/noetl/runs, runs_at_once: 8}
    """

    def __init__(self, folder: str, runs_at_once: int, inst_data: Any = None) -> None:
        super().__init__(inst_data)
        self._folder = Path(folder)
        self._at_once = runs_at_once

    @classmethod
    def config_type(cls) -> Any:
        """Returns the fields of ``config`` in ``dagster.yaml``."""
        return {
            "folder": Field(StringSource, description="Where run servers listen and keep their logs"),
            "runs_at_once": Field(
                IntSource, is_required=False, default_value=8, description="Runs that are driven at once"
            ),
        }

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Mapping[str, Any]) -> WarmRunLauncher:
        """Makes the launcher that ``dagster.yaml`` configures."""
        return cls(inst_data=inst_data, **config_value)

    def launch_run(self, context: LaunchRunContext) -> None:
        """Hands a run to the run server, or launches it the default way."""
        run = context.dagster_run
        if not _is_of_playbook(run) or "DAGSTER_HOME" not in os.environ:
            super().launch_run(context)
            return
        address = Address.of(self._folder, os.environ, self._at_once)
        # before the server has it: after a crash, the next server looks for the tag
        self._instance.add_run_tags(run.run_id, {LAUNCHER_TAG: address.key})
        request = {
            "do": "run",
            "id": run.run_id,
            "priority": priority_of(run.tags),
        }
        try:
            with closing(address.open()) as channel:
                answer = channel.ask(request)
            if answer is None or "accepted" not in answer:
                raise ServiceError(f"the run server does not take the run; see {address.log}")
        except (ServiceError, OSError) as error:
            logger.warning("run %s starts the default way: %s", run.run_id, error)
            self._instance.add_run_tags(run.run_id, {LAUNCHER_TAG: ""})
            super().launch_run(context)
            return
        self._run_ids.add(run.run_id)
        if answer["ahead"]:
            self._instance.report_engine_event(
                f"Waits for {answer['ahead']} other runs: {self._at_once} are driven at once.", run
            )

    def terminate(self, run_id: str) -> bool:
        """Interrupts the driver of a run, or withdraws a run that waits; reports whether it was found."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        if driver_of(self._locks, run_id) is not None:
            self._instance.report_run_canceling(run)
            return interrupt(self._locks, run_id)
        if not run.tags.get(LAUNCHER_TAG):
            terminated: bool = super().terminate(run_id)  # type: ignore[no-untyped-call]
            return terminated
        self._instance.report_run_canceling(run)
        withdrawn = self._request_from_owner(run, "withdraw")
        if withdrawn is not None and withdrawn["withdrawn"]:
            self._instance.report_run_canceled(run, message="terminated before it began")
            return True
        deadline = time.monotonic() + BEGIN_SECONDS  # a driver has received it and not started it yet
        while not interrupt(self._locks, run_id):
            answer = self._request_from_owner(run, "ask")
            if answer is None or not answer["known"] or time.monotonic() > deadline:
                return interrupt(self._locks, run_id)
            time.sleep(0.05)
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Always true: Dagster's run monitoring may ask."""
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Reports to Dagster's run monitoring whether a process drives a run."""
        if driver_of(self._locks, run.run_id) is not None:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        if not run.tags.get(LAUNCHER_TAG):
            return CheckRunHealthResult(WorkerStatus.UNKNOWN, "the run was launched the default way")
        if run.status is DagsterRunStatus.STARTING:
            answer = self._request_from_owner(run, "ask")
            if answer is not None and answer["known"]:
                return CheckRunHealthResult(WorkerStatus.RUNNING, "waits to be driven")
        return CheckRunHealthResult(WorkerStatus.NOT_FOUND, "no process drives the run")

    @property
    def _locks(self) -> Path:
        return self._folder / "runs"

    def _request_from_owner(self, run: DagsterRun, do: str) -> Message | None:
        """Returns the answer of the server that received a run; None if that server is gone."""
        return Address(self._folder, run.tags[LAUNCHER_TAG], {}, 0).ask({"do": do, "id": run.run_id})


def _is_of_playbook(run: DagsterRun) -> bool:
    """Reports whether a run is of our code location. The code of others may have changed since it was imported."""
    origin = run.remote_job_origin
    location = origin.repository_origin.code_location_origin if origin is not None else None
    loaded = getattr(location, "loadable_target_origin", None)
    return loaded is not None and loaded.module_name == LOCATION
