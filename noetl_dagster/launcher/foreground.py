"""Executions that the run server drives while a command waits, as ``noetl-dagster run`` does."""

from __future__ import annotations

import os
import select
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from noetl_dagster import embedded
from noetl_dagster.errors import ServiceError
from noetl_dagster.launcher.address import Address, Channel, driver_of, execute_request, interrupt
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.settings import Settings

POLL_SECONDS = 0.2


def drive(
    settings: Settings,
    playbook: Playbook,
    execution_id: int,
    workload: dict[str, Any],
    *,
    resumed: bool = False,
) -> str | None:
    """Lets the run server of this process's environment drive an execution, and waits for the end of its run.

    An interrupt of the waiting process interrupts the run.

    Returns:
        The error of the run; None if it succeeded.

    Raises:
        ServiceError: there is no run server, or it is busy; nothing was started.
    """
    folder = embedded.run_server_folder(settings)
    request = execute_request(playbook.file, execution_id, workload, resumed=resumed)
    run_id = request["run_id"]
    sent = False
    with closing(Address.of(folder, os.environ, settings.driven_at_once).open()) as channel:
        try:
            status = channel.ask({"do": "status"})
            if status is None or len(status["driven"]) + len(status["waiting"]) >= settings.driven_at_once:
                raise ServiceError("the run server is busy")
            sent = True
            channel.send(request)
            return _wait_for_end(channel, folder / "runs", run_id)
        except OSError as error:
            raise ServiceError(f"the run server is gone: {error}") from error
        except KeyboardInterrupt:
            if sent:
                # a second interrupt ends the wait
                with suppress(KeyboardInterrupt, OSError, ServiceError):
                    channel.send({"do": "withdraw", "id": request["id"]})
                    _wait_for_end(channel, folder / "runs", run_id, interrupting=True)
            raise


def _wait_for_end(channel: Channel, locks: Path, run_id: str, *, interrupting: bool = False) -> str | None:
    """Waits for the end of a run and returns its error. If the server is gone, waits for the driver.

    Args:
        interrupting: interrupts the run as soon as a driver has it.
    """
    while True:
        if interrupting:
            interrupting = not interrupt(locks, run_id)
            readable, _, _ = select.select([channel], [], [], POLL_SECONDS if interrupting else None)
            if not readable:
                continue
        messages = channel.arrived()
        if messages is None:
            break
        for message in messages:
            if "ended" in message:
                error: str | None = message["error"]
                return error
            if "refused" in message:
                raise ServiceError(message["error"])
            if message.get("withdrawn"):
                return "withdrawn before it began"
    while driver_of(locks, run_id) is not None:
        interrupting = interrupting and not interrupt(locks, run_id)
        time.sleep(POLL_SECONDS)
    return "the run server ended"
