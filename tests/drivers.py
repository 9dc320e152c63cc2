"""Drivers of executions in processes of their own, which tests kill."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from tests import forked


def drive(environment: Mapping[str, str], execution_id: int, said: Path) -> ForkServerProcess:
    """Starts a process that drives an execution, and writes down how it ended."""
    process = forked.process(environment, _drive, execution_id, said)
    process.start()
    return process


def _drive(execution_id: int, said: Path) -> None:
    async def driven() -> str:
        engine = await Engine.open(Settings())
        state = await engine.resume(execution_id)
        await engine.close()
        return f"{state.status} {state.error}"

    said.write_text(asyncio.run(driven()))
