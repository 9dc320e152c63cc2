"""Child playbooks that are registered: by version, by path, and where there is a file too."""

from __future__ import annotations

from pathlib import Path

from noetl_dagster.compiler.partitions import PlaybookPartitions
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.overview import overview
from noetl_dagster.events.catalog import draft_of
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import RunServices
from tests.engine.conftest import Run
from tests.playbooks import playbook, text_of


def child(result: int) -> str:
    code = f'tool: {{kind: python, code: "result = {result}"}}'
    return text_of("child", f"\nworkflow:\n  - step: start\n    {code}\n")


def calling(tool: str) -> str:
    return f"""
    workload: {{number: 1}}
    workflow:
      - step: call
        tool: {{kind: playbook, {tool}}}
    """


VERSIONS = [
    ("path: tests/child@1", 1),
    ("path: tests/child@2", 2),
    ("path: tests/child@latest", 2),
    ("path: tests/child", 2),
    ("path: 'tests/child@{{ number }}'", 1),
    ("path: tests/child, version: 1", 1),
    ("path: tests/child, version: latest", 2),
    ("path: tests/child, version: '0.1.0'", 2),  # of the metadata, which names no registered one
]


async def test_a_child_of_a_version(engine: Engine, run: Run) -> None:
    for number in (1, 2):
        await engine.runtime.registered.register(draft_of(child(number)))
    for tool, result in VERSIONS:
        state = await run(calling(tool))
        assert state.status is ExecutionStatus.COMPLETED, (tool, state.error)
        assert state.latest["call"].envelope["data"] == result, tool


async def test_a_version_that_is_not_there(engine: Engine, run: Run) -> None:
    await engine.runtime.registered.register(draft_of(child(1)))

    state = await run(calling("path: tests/child@2"))

    assert state.status is ExecutionStatus.FAILED
    assert "step call: child playbook 'tests/child@2'" in (state.error or "")
    assert "has no version 2; it has 1" in (state.error or "")


async def test_a_child_that_is_broken_is_not_one_that_is_missing(run: Run, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(child(1).replace("kind: python", "kind: pyton"))

    for path, kind in ((broken, "schema"), (tmp_path / "nowhere.yaml", "not_found")):
        state = await run(calling(f"path: '{path}'"))
        error = state.latest["call"].envelope["error"]
        assert error["kind"] == kind
        assert ("no playbook" in error["message"]) == (kind == "not_found")


async def test_a_child_of_no_partition(engine: Engine, tmp_path: Path) -> None:
    partitioned = tmp_path / "partitioned.yaml"
    partitioned.write_text("dagster: {partitions: {kind: daily, start: '2026-01-01'}}\n" + child(1))
    services = RunServices(choose_partition=lambda child, values: PlaybookPartitions(child).choose(values))

    execution = await engine.lifecycle.create(playbook(calling(f"path: '{partitioned}'")))
    state = await engine.drive(execution, services=services)

    assert state.status is ExecutionStatus.FAILED
    error = state.latest["call"].envelope["error"]
    assert error["kind"] == "schema"
    assert "step call: child playbook 'tests/child': playbook child has partitions: choose one" in error["message"]


async def test_children_of_a_lenient_playbook_are_lenient(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "foreign.yaml").write_text(child(1).replace("kind: python", "kind: python, cods: b"))
    text = text_of("sample", calling(f"path: '{tmp_path / 'foreign.yaml'}'"))

    strict = await engine.run(parse_playbook(text))
    lenient = await engine.run(parse_playbook(text, lenient=True))

    assert "has no field 'cods'" in (strict.error or "")
    assert lenient.status is ExecutionStatus.COMPLETED, lenient.error
    [of_child] = await engine.runtime.pool.fetch(
        "SELECT execution_id, error FROM noetl.event WHERE event_type = 'warning'"
    )
    assert of_child["error"].startswith("line 7: step 'start': python has no field 'cods'")
    assert of_child["execution_id"] != lenient.execution_id


async def test_a_lenient_execution_is_resumed_without_its_stored_model(
    engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    code = f"import pathlib; result = pathlib.Path('{tmp_path / 'mended'}').read_text()"
    text = text_of("sample", f'workflow: [{{step: start, colour: red, tool: {{kind: python, code: "{code}"}}}}]\n')
    failed = await engine.run(parse_playbook(text, lenient=True))
    assert failed.status is ExecutionStatus.FAILED
    (tmp_path / "mended").write_text("1")
    await engine.runtime.pool.execute("UPDATE noetl.catalog SET model = NULL")  # as of values that JSON lacks

    other = await Engine.open(settings)
    try:
        execution = await other.lifecycle.resume(failed.execution_id)
        await other.walker.run(execution)
    finally:
        await other.close()

    assert execution.state.status is ExecutionStatus.COMPLETED, execution.state.error
    found = await overview(engine.runtime, failed.execution_id)
    assert [warning.partition(";")[0] for warning in found.warnings] == ["line 4: step 'start': unknown key 'colour'"]


async def test_the_workload_of_a_child_is_checked(engine: Engine, run: Run) -> None:
    steps = "\nworkload: {count: 1, name: x}\nworkflow: [{step: start, tool: {kind: noop}}]\n"
    await engine.runtime.registered.register(draft_of(text_of("child", steps)))

    wrong = await run(calling('path: tests/child, input: {count: "5"}'))
    state = await run(calling("path: tests/child, input: {count: 5, nmae: y}"))

    assert wrong.status is ExecutionStatus.FAILED
    assert "child playbook 'tests/child': workload.count is the text '5', but its default is an integer" in str(
        wrong.error
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    child_id = int(state.latest["call"].envelope["playbook"]["execution_id"])
    found = await overview(engine.runtime, child_id)
    assert list(found.warnings) == ["the workload has no key 'nmae'; did you mean 'name'?"]
