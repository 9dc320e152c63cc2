"""Executions in a process that is killed at a moment of a tool's call."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from tests import forked
from tests.playbooks import playbook

EXECUTION = "SELECT max(execution_id) FROM noetl.event WHERE event_type = 'playbook.initialized'"


async def killed(settings: Settings, text: str, prepare: Callable[..., None], *arguments: Any) -> None:
    """Runs a playbook in a new process until that is killed.

    Args:
        prepare: a function of a module. The new process calls it first; it replaces code by code that calls ``die``.
    """
    process = forked.process(os.environ, _drive, settings, text, prepare, *arguments)
    process.start()
    await asyncio.to_thread(process.join)
    assert process.exitcode == -signal.SIGKILL


def die() -> None:
    """Kills the own process."""
    os.kill(os.getpid(), signal.SIGKILL)


def _drive(settings: Settings, text: str, prepare: Callable[..., None], *arguments: Any) -> None:
    prepare(*arguments)

    async def run() -> None:
        engine = await Engine.open(settings)
        state = await engine.run(playbook(text))
        raise AssertionError(f"it was not killed: {state.error}")

    asyncio.run(run())
