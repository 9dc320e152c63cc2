"""One execution is one tree of spans, whatever runs its parts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.ids import snowflake_milliseconds
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.process.spans import trace_id_of
from noetl_dagster.settings import Settings
from tests.forked import fork_helpers
from tests.playbooks import playbook, text_of
from tests.pool import working
from tests.process.tracing.collector import Collector

EVERYTHING = """
workflow:
  - step: start
    tool: {kind: python, code: "result = [1, 2, 3]"}
    next: [each]
  - step: each
    loop: {in: "{{ start.data }}", iterator: n, spec: {mode: parallel}}
    tool:
      - double: {kind: python, input: {n: "{{ n }}"}, code: "result = n * 2"}
      - say: {kind: python, input: {n: "{{ _prev }}"}, code: "result = {'n': n}"}
    next: [fan]
  - step: fan
    loop: {in: "{{ range(4) }}", iterator: n}
    spec: {loop_mode: fanout, fanout: {max_groups: 2}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
    next: [runs]
  - step: runs
    spec: {loop_mode: fanout, fanout: {granularity: partition}}
    loop: {in: "{{ range(4) }}", iterator: n}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
    next: [pooled]
  - step: pooled
    spec: {dispatch: workers}
    loop: {in: [5, 6], iterator: n, spec: {mode: parallel}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
    next: [family]
  - step: family
    tool: {kind: playbook, path: tests/child}
    next: [again]
  - step: again
    tool:
      kind: python
      input: {attempt: "{{ _attempt }}"}
      code: "result = 1 / (attempt - 1)"
      spec: {policy: {rules: [{when: "{{ error is defined }}", then: {do: retry, attempts: 2, delay: 0}}]}}
    next: [broken]
  - step: broken
    tool: {kind: python, code: "raise ValueError('no more')"}
"""
CHILD = text_of("child", "workflow: [{step: inner, tool: {kind: playbook, path: tests/grandchild}}]")
GRANDCHILD = text_of("grandchild", 'workflow: [{step: innermost, tool: {kind: python, code: "result = 1"}}]')


async def test_everything_that_a_playbook_does(settings: Settings, collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text(CHILD)
    (tmp_path / "grandchild.yaml").write_text(GRANDCHILD)
    own = settings.model_copy(update={"playbooks_path": tmp_path})
    engine = await Engine.open(own)
    async with working(own, "w1"):
        state = await engine.run(playbook(EVERYTHING))
    await engine.close()
    assert state.status is ExecutionStatus.FAILED
    await collector.whole("sample")

    root = collector.one("sample")
    assert root.trace_id == f"{trace_id_of(state.execution_id):032x}"
    assert root.start == snowflake_milliseconds(state.began) * 1_000_000
    assert root.attributes["noetl.execution_id"] == str(state.execution_id)
    assert root.attributes["noetl.path"] == "tests/sample"
    assert root.resource["service.name"] == "noetl-dagster"
    steps = ["start", "each", "fan", "runs", "pooled", "family", "again", "broken"]
    assert sorted(span.name for span in collector.below(root)) == sorted(steps)

    def commands(step: str) -> Counter[str]:
        return Counter(span.name for span in collector.below(collector.one(step)))

    assert commands("each") == {"each command": 3}
    for command in collector.named("each command"):
        assert [span.name for span in collector.below(command)] == ["each.double", "each.say"]
    assert sorted(span.attributes["noetl.index"] for span in collector.named("each command")) == [0, 1, 2]
    assert commands("fan") == {"fan command": 4}
    assert commands("runs").total() == len(collector.named("runs command")) > 0
    assert commands("pooled") == {"pooled command": 2}
    assert {span.attributes["noetl.worker_id"] for span in collector.named("pooled command")} == {"w1"}

    assert collector.one("family.playbook").parent == collector.one("family command").span_id
    assert collector.one("child").parent == collector.one("family command").span_id
    assert collector.one("grandchild").parent == collector.one("inner command").span_id
    assert collector.one("innermost").attributes["noetl.path"] == "tests/grandchild"

    tries = collector.below(collector.one("again command"))
    assert [span.attributes["noetl.attempt"] for span in tries] == [1, 2]
    assert [span.error is not None for span in tries] == [True, False]

    for name in ("broken.python", "broken command", "broken", "sample"):
        span = collector.one(name)
        assert "no more" in (span.error or ""), span
        assert span.attributes["error.type"]
    for span in collector.spans:
        assert span.start <= span.end


async def test_helper_processes_of_a_run_add_to_it(
    settings: Settings, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_helpers(monkeypatch.setattr)
    body = """
    workload: {file: ""}
    workflow:
      - step: start
        loop: {in: "{{ range(200) }}", iterator: n, spec: {mode: parallel, max_in_flight: 4}}
        tool:
          kind: python
          input: {file: "{{ file }}"}
          code: |
            import os, pathlib, time
            path = pathlib.Path(file)
            with path.open("a") as lines:
                lines.write(f"{os.getpid()}\\n")
            if len(set(path.read_text().split())) < 2:
                time.sleep(0.2)
    """
    engine = await Engine.open(settings.model_copy(update={"run_processes": 2}))
    state = await engine.run(playbook(body), {"file": str(tmp_path / "pids")})
    await engine.close()
    assert state.status is ExecutionStatus.COMPLETED, state.error
    await collector.whole("sample")
    commands = collector.named("start command")
    assert len(commands) == 200
    assert len({span.resource["process.pid"] for span in commands}) == 2
