"""Spark's session starts while earlier steps run, where a spark step is sure to come, and fails nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import ModuleType

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions import spark_ahead
from noetl_dagster.engine.executions.spark_ahead import spark_steps_ahead
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.settings import Settings, dump_settings
from noetl_dagster.spark import ahead, sessions
from noetl_dagster.worker.execution import Execution, PlaybookProgram
from tests.playbooks import playbook, text_of
from tests.waiting import PROCESS_SECONDS, until

pytestmark = pytest.mark.long

CRUNCH = """
  - step: crunch
    tool: {kind: spark, sql: SELECT 1 AS one, collect: true}
"""
SLOW = "kind: python, code: 'import time; time.sleep(0.1)'"
BEFORE = """
workflow:
  - step: start
    tool: {kind: noop}
    next:
"""


def flow(arcs: str, rest: str = CRUNCH) -> str:
    return BEFORE + textwrap.indent(textwrap.dedent(arcs).strip("\n"), " " * 6) + "\n" + rest.strip("\n") + "\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (flow("- step: crunch"), ["crunch"]),
        (flow("- {step: crunch, when: '{{ start.x }}'}"), []),
        (flow("- {step: other, when: '{{ start.x }}'}\n- step: crunch", CRUNCH + "  - step: other\n"), []),
        (flow("- step: crunch\n- {step: other, when: '{{ x }}'}", CRUNCH + "  - step: other\n"), ["crunch"]),
        (
            flow(
                "spec: {mode: inclusive}\narcs:\n  - {step: other, when: '{{ x }}'}\n  - step: crunch",
                CRUNCH + "  - step: other\n",
            ),
            ["crunch"],
        ),
        (flow("- step: crunch", CRUNCH + "    spec: {admit: '{{ x }}'}\n"), []),
        (flow("- step: crunch", CRUNCH + "    spec: {dispatch: workers}\n"), []),
        (flow("- {step: crunch, on: call.partial}"), ["crunch"]),
        (flow("- {step: crunch, on: call.partial, when: '{{ event.payload.data }}'}"), []),
        (
            flow(
                "- {step: other, on: call.partial}\n- step: crunch",
                CRUNCH + "  - {step: other, tool: {kind: noop}}\n",
            ),
            ["crunch"],
        ),
        (flow("- step: last", "  - step: last\n    tool: {kind: noop}\n" + CRUNCH), []),
        (
            flow(
                "- step: shards",
                """
  - step: shards
    loop: {in: [1, 2], iterator: item}
    spec: {loop_mode: fanout, fanout: {engine: spark}}
    tool: {kind: noop}
""",
            ),
            ["shards"],
        ),
        (
            "workbook:\n  - {name: sums, tool: {kind: spark, sql: SELECT 1}}\n"
            + flow("- step: crunch", "  - step: crunch\n    tool: {kind: workbook, name: sums}\n"),
            ["crunch"],
        ),
    ],
)
def test_steps_that_will_need_spark_whatever_happens(text: str, found: list[str]) -> None:
    flow = playbook(text)
    state = ExecutionState(1, flow.name, 1, None, epoch=1)
    assert spark_steps_ahead(Execution(PlaybookProgram(flow, StepGraph(flow)), state)) == found


async def test_what_has_ended_needs_nothing(engine: Engine) -> None:
    text = flow(
        "- step: crunch",
        """
  - step: crunch
    tool: {kind: spark, sql: SELECT 1 AS one, collect: true}
    next: [{step: last}]
  - step: last
    tool: {kind: python, code: "raise ValueError('not yet')"}
""",
    )
    engine.runtime.tool_context.spark = refused
    execution = await engine.lifecycle.create(playbook(text))
    assert spark_steps_ahead(execution) == ["crunch"]
    await engine.steps.run(execution, "start")
    assert spark_steps_ahead(execution) == ["crunch"]
    await engine.steps.run(execution, "crunch")
    assert spark_steps_ahead(execution) == []


async def test_the_jvm_compiles_quickly_unless_the_steps_took_long_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []

    def started_ahead(*arguments: object, short: bool, **named: object) -> bool:
        started.append(short)
        return True

    monkeypatch.setattr(spark_ahead, "may_start_ahead", lambda settings: True)
    monkeypatch.setattr(spark_ahead, "start_ahead", started_ahead)
    text = flow("- step: crunch", CRUNCH.replace("kind: spark, sql: SELECT 1 AS one, collect: true", SLOW))
    earlier = await engine.run(playbook(text))
    assert earlier.status == "COMPLETED"
    monkeypatch.setattr(spark_ahead, "spark_steps_ahead", lambda execution: ["crunch"])

    async def is_projected() -> bool:
        execution = await engine.lifecycle.create(playbook(text))
        before = await engine.runtime.pool.fetchval(spark_ahead.SECONDS_BEFORE, execution.id, ["crunch"])
        return before is not None

    await until(is_projected, "the projection of the earlier execution")
    for limit in (60.0, 0.01):
        monkeypatch.setattr(spark_ahead, "SHORT_SECONDS", limit)
        execution = await engine.lifecycle.create(playbook(text))
        assert await spark_ahead.prepare_spark(engine.runtime, execution)
    assert started == [True, False]


@pytest.mark.parametrize(("short", "option"), [(True, sessions.FIRST_ONLY), (False, sessions.HOT_ONLY)])
def test_options_of_the_compiler(short: bool, option: str) -> None:
    assert option in sessions.session_config(Settings(), short=short)[sessions.JAVA_OPTIONS]


def refused() -> None:
    raise ServiceError("no Spark here")


async def test_a_session_that_does_not_start_fails_its_step_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_has_session", lambda: False)
    asked: list[str] = []

    def spark() -> None:
        asked.append(threading.current_thread().name)
        raise ServiceError("Spark at nowhere does not start")

    engine.runtime.tool_context.spark = spark  # type: ignore[assignment]
    text = flow(
        "- step: wait",
        """
  - step: wait
    tool: {kind: python, code: "import time; time.sleep(0.5)"}
    next: [{step: crunch}]
"""
        + CRUNCH,
    )
    state = await engine.run(playbook(text))
    assert state.status == "FAILED"
    assert "Spark at nowhere does not start" in str(state.error)
    assert asked[0] == "noetl-spark-ahead"
    assert "crunch" in str(state.error)


def test_nothing_starts_on_connect() -> None:
    assert not ahead.start_ahead(refused, Settings(spark_remote="sc://here:1"))  # type: ignore[arg-type]


def test_a_module_that_another_thread_imports_holds_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.core.context", ModuleType("pyspark.core.context"))
    assert not ahead._has_session()


RUN = """
import asyncio, sys
from noetl_dagster.engine.engine import Engine
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import load_settings

async def main():
    engine = await Engine.open(load_settings(sys.argv[1]))
    assert "pyspark" not in sys.modules, "a runtime starts without Spark"
    try:
        for text in sys.argv[2:]:
            state = await engine.run(parse_playbook(text, file="flow.yaml"), {})
            print(state.status, state.error, state.latest["crunch"].envelope["data"] if "crunch" in state.latest else "")
    finally:
        await engine.close()

asyncio.run(main())
"""


@pytest.mark.spark
@pytest.mark.slow  # a JVM of its own
def test_the_session_is_there_when_its_step_begins(settings: Settings, tmp_path: Path) -> None:
    """Cold, in a process of its own: the step before waits for the session that starts beside it."""
    wait = """
  - step: wait
    tool:
      kind: python
      code: |
        import sys, time
        def main():
            for _ in range(600):
                half_imported = sys.modules.get("pyspark.core.context")
                context = getattr(half_imported, "SparkContext", None)
                if context is not None and context._active_spark_context is not None:
                    return "there"
                time.sleep(0.1)
            raise ValueError("nobody started Spark")
"""
    plain = text_of("plain", flow("- step: last", "  - step: last\n    tool: {kind: noop}\n"))
    starts = text_of("starts", flow("- step: wait", wait + "    next: [{step: crunch}]\n" + CRUNCH))
    own = settings.model_copy(update={"spark_master": "local[1]", "spark_driver_memory": "512m"})
    done = subprocess.run(
        [sys.executable, "-c", RUN, dump_settings(own), plain, starts],
        capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.stdout.count("COMPLETED") == 2, done.stdout + done.stderr
    assert "'one': 1" in done.stdout
