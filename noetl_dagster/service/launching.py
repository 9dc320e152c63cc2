"""Starts executions as Dagster runs in processes of their own, if there is no run server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from noetl_dagster.engine.engine import Engine
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.event_loop import cancel_and_wait

logger = logging.getLogger(__name__)

TAIL_BYTES = 2_000


class ProcessLauncher:
    """Runs ``noetl-dagster run`` for each execution, with this environment. Runs continue when the service ends."""

    def __init__(self, engine: Engine, environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._environment = dict(environment)
        self._watching: set[asyncio.Task[None]] = set()

    async def launch(self, playbook: Playbook, execution_id: int, workload: dict[str, Any]) -> None:
        """Starts the process, and returns without waiting for it."""
        with tempfile.NamedTemporaryFile(
            prefix=f"noetl-{execution_id}-", suffix=".json", delete=False
        ) as payload:
            payload.write(orjson.dumps(workload))
        log = Path(payload.name).with_suffix(".log")
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "noetl_dagster", "run", playbook.file, "--json"),
                *("--payload", payload.name, "--execution-id", str(execution_id)),
                env={**os.environ, **self._environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )
        task = asyncio.create_task(self._watch(process, execution_id, [Path(payload.name), log]))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    @property
    def running(self) -> int:
        """Number of started processes that have not ended."""
        return len(self._watching)

    async def close(self) -> None:
        """Stops watching; the runs are processes of their own."""
        await cancel_and_wait(*self._watching)

    async def _watch(self, process: asyncio.subprocess.Process, execution_id: int, files: list[Path]) -> None:
        """Fails the execution if its process ended before the run began."""
        code = await process.wait()
        output_tail = files[-1].read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        for file in files:
            file.unlink(missing_ok=True)
        if code == 0:
            return
        if await self._engine.lifecycle.fail_unstarted(execution_id, f"the run did not start: {output_tail}"):
            logger.error("execution %d did not start: %s", execution_id, output_tail)
