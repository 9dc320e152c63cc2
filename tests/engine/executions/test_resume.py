"""A resumed execution runs the playbook with which it began."""

from __future__ import annotations

from noetl_dagster.engine.engine import Engine
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
