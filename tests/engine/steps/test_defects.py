"""What a tool or a sink should not raise fails the task; what says nothing of the task leaves it to be resumed."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import TransportError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.tools.registry import NoopTool
from noetl_dagster.worker import runner
from tests.engine.conftest import Run
from tests.playbooks import playbook

ONE = "workflow:\n  - step: start\n    tool: {kind: noop}\n"
TAKEN = (
    ONE + "    next: [{step: take, on: call.partial}]\n  - step: take\n    tool: {kind: python, code: 'result = 1'}\n"
)


def raising(error: BaseException) -> Any:
    async def run(*args: object, **kwargs: object) -> None:
        raise error

    return run


@pytest.mark.parametrize("text", [ONE, TAKEN])
@pytest.mark.parametrize("error", [KeyError("lost"), ExceptionGroup("both", [ValueError("lost"), TypeError("lost")])])
async def test_a_defect_of_a_tool_fails_its_task(
    run: Run, monkeypatch: pytest.MonkeyPatch, text: str, error: Exception
) -> None:
    monkeypatch.setattr(NoopTool, "run", raising(error))
    state = await run(text)
    assert state.status is ExecutionStatus.FAILED
    failure = state.latest["start"].envelope["error"]
    assert failure["message"] == f"noop in step start: {type(error).__name__}: {error}"
    assert (failure["kind"], failure["code"]) == ("unknown", type(error).__name__)


async def test_policies_see_a_defect(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoopTool, "run", raising(KeyError("lost")))
    state = await run(
        "workflow:\n  - step: start\n    tool: {kind: noop, spec: {policy: {rules: "
        "[{when: \"{{ error.code == 'KeyError' }}\", then: {do: continue}}]}}}\n"
    )
    assert state.status is ExecutionStatus.COMPLETED


NOT_OF_THE_TASK = [
    TransportError("away"),
    ConnectionRefusedError("away"),
    asyncpg.ConnectionDoesNotExistError("away"),
    ExceptionGroup("both", [ValueError("lost"), ConnectionResetError("away")]),
    RuntimeError("cannot schedule new futures after interpreter shutdown"),
    TimeoutError("no connection in time"),
    MemoryError(),
]


async def test_what_is_no_failure_of_the_task_is_resumed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in NOT_OF_THE_TASK:
        with monkeypatch.context() as patched:
            patched.setattr(NoopTool, "run", raising(error))
            with pytest.raises(type(error)):
                await engine.run(playbook(ONE))
        execution_id = await engine.runtime.pool.fetchval("SELECT max(execution_id) FROM noetl.event")
        assert (await engine.runtime.load(execution_id)).state.status is ExecutionStatus.RUNNING, error
        state = await engine.resume(execution_id)
        assert state.status is ExecutionStatus.COMPLETED, error


async def test_the_text_of_a_defect_has_no_secrets(run: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "NOETL_CREDENTIAL_DOOR", '{"type": "postgres", "data": {"dsn": "postgresql://u:opensesame@h/d"}}'
    )
    await engine.runtime.tool_context.credentials.resolve("door")
    monkeypatch.setattr(NoopTool, "run", raising(ValueError("invalid DSN postgresql://u:opensesame@h/d")))
    state = await run(ONE)
    assert "opensesame" not in state.latest["start"].envelope["error"]["message"]


async def test_a_defect_of_a_sink_fails_its_task(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "write_sink", raising(KeyError("lost")))
    state = await run(ONE + "    sink: {tool: postgres, table: t}\n")
    assert state.status is ExecutionStatus.FAILED
    message = "sink postgres in step start: KeyError: 'lost'"
    assert state.latest["start"].envelope["error"]["message"] == message
