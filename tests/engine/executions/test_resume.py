"""A resumed execution runs the playbook with which it began."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ExecutionStateError
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.settings import Settings
from tests.playbooks import playbook

TEXT = """
workload: {broken: true}
workflow:
  - step: first
    tool: {kind: python, code: "result = 20"}
    next: [second]
  - step: second
    tool:
      kind: python
      input: {n: "{{ first }}", broken: "{{ workload.broken }}"}
      code: |
        from pathlib import Path
        if not Path("FLAG").exists():
            raise ValueError("not yet")
        result = n + 1
"""


async def test_a_text_that_a_later_version_refuses_still_resumes(settings: Settings) -> None:
    flag = settings.home / "go"
    first = await Engine.open(settings)
    failed = await first.run(playbook(TEXT.replace("FLAG", str(flag))))
    assert failed.status == "FAILED"
    await first.runtime.pool.execute(
        "UPDATE noetl.catalog SET content = replace(content, 'python', 'withdrawn') WHERE catalog_id = $1",
        failed.catalog_id,
    )
    await first.close()
    flag.touch()

    later = await Engine.open(settings)  # has compiled nothing yet
    resumed = await later.resume(failed.execution_id)
    await later.close()
    assert resumed.status == "COMPLETED"
    assert resumed.latest["second"].envelope["data"] == 21


async def test_an_execution_of_a_clock_that_was_ahead_is_resumed(settings: Settings) -> None:
    flag = settings.home / "go"
    ahead = await Engine.open(settings)
    ahead.runtime.ids.follow(snowflake_floor(datetime.now(UTC) + timedelta(hours=1)))
    failed = await ahead.run(playbook(TEXT.replace("FLAG", str(flag))))
    assert failed.status == "FAILED"
    await ahead.close()
    flag.touch()

    right = await Engine.open(settings)
    resumed = await right.resume(failed.execution_id)
    found = await right.runtime.state(failed.execution_id)
    await right.close()
    assert (resumed.status, found.status, found.epoch) == ("COMPLETED", "COMPLETED", 2)


async def test_one_of_two_processes_that_follow_an_epoch_resumes_it(settings: Settings) -> None:
    engine = await Engine.open(settings)
    failed = await engine.run(playbook(TEXT.replace("FLAG", str(settings.home / "never"))))
    await engine.lifecycle.resume(failed.execution_id, after=failed.epoch)

    with pytest.raises(ExecutionStateError, match="resumed by another process"):
        await engine.lifecycle.resume(failed.execution_id, after=failed.epoch)
    await engine.close()
