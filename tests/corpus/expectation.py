"""What a playbook of the corpus says about its own execution, in the comment at its head.

``# expect:`` is followed by YAML with any of:

- ``given``: the workload of the execution, over the playbook's own.
- ``status``: COMPLETED (the default) or FAILED; ``error``: a part of the message.
- ``results``: by step, the data of its result. ``tasks``: by step and task.
- ``ctx``: keys of the final context. ``visits``: by step, how often it was entered; null is never.
- ``events``: by type, how many the log has.
- ``refused``: a part of the message with which the loader refuses the playbook.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.templates.rendering import with_references
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView, plain

FOLDER = Path(__file__).parent
MARK = "# expect:"
EVENT_COUNTS = "SELECT event_type, count(*) FROM noetl.event WHERE execution_id = $1 GROUP BY 1"


@dataclass(frozen=True)
class Expectation:
    given: dict[str, Any] = field(default_factory=dict)
    status: str = "COMPLETED"
    error: str = ""
    results: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    ctx: dict[str, Any] = field(default_factory=dict)
    visits: dict[str, int | None] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    refused: str = ""

    @classmethod
    def of(cls, path: Path) -> Expectation:
        lines = path.read_text().splitlines()
        start = lines.index(MARK) + 1
        stop = next(place for place in range(start, len(lines) + 1) if not lines[place : place + 1]
                    or not lines[place].startswith("#"))  # fmt: skip
        return cls(**(yaml.safe_load("\n".join(line[1:] for line in lines[start:stop])) or {}))

    async def check(self, state: ExecutionState, runtime: Runtime) -> None:
        assert str(state.status) == self.status, (state.error, [end.error for end in state.ends.values()])
        assert self.error in (state.error or ""), state.error
        for step, data in self.results.items():
            assert await value_of(state.latest[step].envelope, runtime) == data, step
        for step, tasks in self.tasks.items():
            for task, data in tasks.items():
                envelope = state.latest[step].envelope["results"][task]
                assert await value_of(envelope, runtime) == data, f"{step}.{task}"
        assert {key: state.ctx.get(key) for key in self.ctx} == self.ctx
        assert {step: state.visits.get(step) for step in self.visits} == self.visits
        if self.events:
            rows = await runtime.pool.fetch(EVENT_COUNTS, state.execution_id)
            counts = {row["event_type"]: row["count"] for row in rows}
            assert {type_: counts.get(type_, 0) for type_ in self.events} == self.events


async def value_of(envelope: dict[str, Any], runtime: Runtime) -> Any:
    """A result as templates see it; of loops only the list of results."""
    cache = ReferenceCache()
    view = ResultView(envelope, cache)
    return await with_references(runtime.results.get, lambda: plain(view.results if view.is_loop else view))


def playbooks() -> list[Path]:
    return [path for path in sorted(FOLDER.glob("*.yaml")) if MARK in path.read_text()]
