"""Executions that the run server drives while a command waits, as ``noetl-dagster run`` does."""

from __future__ import annotations

import os
import select
import time
import uuid
from contextlib import suppress
from typing import Any

from noetl_dagster import embedded
from noetl_dagster.errors import ServiceError
from noetl_dagster.launcher.address import Address, Channel
from noetl_dagster.launcher.run_locks import driver_of, interrupt
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
    channel = Address.of(folder, os.environ, settings.driven_at_once).open()
    run_id = str(uuid.uuid4())
    sent = False
    try:
        channel.send({"do": "status"})
        status = channel.receive()
        if status is None or len(status["driven"]) + len(status["waiting"]) >= settings.driven_at_once:
            raise ServiceError("the run server is busy")
        sent = True
        channel.send(
            {
                "do": "execute",
                "id": str(execution_id),
                "execution_id": str(execution_id),
                "run_id": run_id,
                "file": playbook.file,
                "workload": workload,
                "resumed": resumed,
                "priority": 0,
            }
        )
        return _wait_for_end(channel, settings, run_id)
    except OSError as error:
        raise ServiceError(f"the run server is gone: {error}") from error
    except KeyboardInterrupt:
        if sent:
            # a second interrupt ends the wait
            with suppress(KeyboardInterrupt, OSError, ServiceError):
                channel.send({"do": "withdraw", "id": str(execution_id)})
                _wait_for_end(channel, settings, run_id, interrupting=True)
        raise
    finally:
        channel.close()


def _wait_for_end(
    channel: Channel, settings: Settings, run_id: str, *, interrupting: bool = False
) -> str | None:
    """Waits for the end of a run and returns its error. If the server is gone, waits for the driver.

    Args:
        interrupting: interrupts the run as soon as a driver has it.
    """
    locks = embedded.run_server_folder(settings) / "runs"
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
