"""What a step reads of other playbooks' results, by asset and by partition."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.assets import Partition, PartitionKey
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.tools.base import RunServices
from tests.playbooks import playbook

MAKER = """
workload: {day: none, value: null}
workflow:
  - step: start
    asset: {key: warehouse/patients}
    tool: {kind: python, input: {day: "{{ day }}", value: "{{ value }}"}, code: "result = {'day': day, 'value': value}"}
"""
READER = """
workload: {day: none}
workflow:
  - step: start
    from: {patients: {asset: warehouse/patients%s}}
    tool: {kind: python, input: {found: "{{ patients.value }}"}, code: "result = found"}
"""
DAILY = 'dagster: {partitions: {kind: daily, start: "2026-01-01", workload: day}}\n'


def of_day(day: str) -> Partition:
    return Partition(key=day, parts={"partition": PartitionKey(key=day)})


@pytest.fixture
def made(engine: Engine) -> Any:
    async def make(text: str, workload: dict[str, Any] | None = None, day: str | None = None) -> ExecutionState:
        flow = playbook((DAILY if day else "") + text, "reading" if "from:" in text else "making")
        partition = of_day(day) if day else None
        execution = await engine.lifecycle.create(flow, workload, partition=partition)
        await engine.walker.run(execution)
        return (await engine.runtime.load(execution.id)).state

    return make


def value(state: ExecutionState) -> Any:
    assert state.status == "COMPLETED", state.error
    return state.latest["start"].envelope["data"]


async def test_the_latest_result_of_another_playbook(made: Any) -> None:
    await made(MAKER, {"value": 1})
    await made(MAKER, {"value": 2})
    state = await made(READER % "")
    assert value(state) == 2
    assert state.reads[("start", 1)]["patients"]["asset"] == "warehouse/patients"


async def test_an_asset_that_nobody_has_made(made: Any) -> None:
    state = await made(READER % "")
    assert state.status == "FAILED"
    assert "asset warehouse/patients has no result yet; run the playbook or the job that makes it" in state.error
    assert state.latest["start"].envelope["error"]["kind"] == "asset"


async def test_the_partition_of_the_execution_is_read(made: Any) -> None:
    await made(MAKER, {"value": 1}, day="2026-01-01")
    await made(MAKER, {"value": 2}, day="2026-01-02")
    assert value(await made(READER % "", day="2026-01-01")) == 1
    assert value(await made(READER % "", day="2026-01-02")) == 2
    state = await made(READER % "", day="2026-01-03")
    assert (
        "asset warehouse/patients has no partition '2026-01-03'; it has 2, from 2026-01-01 to 2026-01-02" in state.error
    )


async def test_one_dimension_of_two_is_the_partition_that_is_read(made: Any, engine: Engine) -> None:
    await made(MAKER, {"value": 1}, day="2026-01-01")
    two = Partition(
        key="2026-01-01|berlin",
        parts={"day": PartitionKey(key="2026-01-01"), "place": PartitionKey(key="berlin")},
    )
    flow = playbook(
        "dagster: {partitions: {two: {day: {kind: daily, start: '2026-01-01'}, place: {static: [berlin]}}}}\n"
        + READER % ""
    )
    execution = await engine.lifecycle.create(flow, partition=two)
    await engine.walker.run(execution)
    assert value(execution.state) == 1


async def test_a_partitioned_playbook_reads_an_asset_without_partitions(made: Any) -> None:
    await made(MAKER, {"value": 7})
    assert value(await made(READER % "", day="2026-01-01")) == 7


async def test_a_given_partition_the_latest_and_all_of_them(made: Any) -> None:
    await made(MAKER, {"value": 2}, day="2026-01-02")
    await made(MAKER, {"value": 1}, day="2026-01-01")
    assert value(await made(READER % ', partition: "2026-01-02"')) == 2
    assert value(await made(READER % ", partition: latest", day="2026-01-09")) == 1
    everything = (READER % ", partition: all").replace(
        "{{ patients.value }}", "{% for day in patients %}{{ day }}={{ patients[day].value }} {% endfor %}"
    )
    assert value(await made(everything)) == "2026-01-01=1 2026-01-02=2 "


async def test_all_of_many_partitions_are_kept_beside_the_event(made: Any, engine: Engine) -> None:
    """A year of small results makes no event of megabytes; they are fetched where they are asked for."""
    large = 3_000
    for number in range(1, 9):
        await made(MAKER, {"value": "x" * large + str(number)}, day=f"2026-01-0{number}")
    text = (READER % ", partition: all").replace(
        "{{ patients.value }}",
        "{{ [patients | length, patients['2026-01-03'].value[-1], '2026-01-09' in patients, patients | list | last] }}",
    )
    state = await made(text)
    assert value(state) == [8, "3", False, "2026-01-08"]
    pool = engine.runtime.pool
    size = "SELECT max(length(context::text)) FROM noetl.event WHERE event_type = 'step.enter'"
    assert await pool.fetchval(size) < large
    entered = "SELECT string_agg(context::text, '') FROM noetl.event WHERE event_type = 'step.enter'"
    texts = await pool.fetchval(entered)
    assert "2026-01-08" not in texts, "not even the keys, of which there may be many"

    await made(MAKER, {"value": "y"}, day="2026-01-03")
    whole = (
        (READER % ", partition: all")
        .replace("{{ patients.value }}", "{{ patients }}")
        .replace("result = found", "result = {day: one['value'][-1] for day, one in found.items()}")
    )
    assert value(await made(whole)) == {f"2026-01-0{n}": "y" if n == 3 else str(n) for n in range(1, 9)}
    again = await engine.runtime.load(state.execution_id)
    assert again.state.reads[("start", 1)] == state.reads[("start", 1)]
    scope = again.scope(cache := ReferenceCache(), "start")
    fetched = await render_async(
        compile_value("{{ patients['2026-01-03'].value[-1] }}"), scope, engine.runtime.results.get
    )
    assert (fetched, len(cache)) == ("3", 1), "as it was settled"


async def test_asset_in_templates(made: Any) -> None:
    await made(MAKER, {"value": 1}, day="2026-01-01")
    await made(MAKER, {"value": 2}, day="2026-01-02")
    text = """
    workload: {day: none}
    workflow:
      - step: start
        loop: {in: "{{ [asset('warehouse/patients').value, asset('warehouse/patients', '2026-01-01').value] }}",
               iterator: one}
        tool: {kind: python, input: {one: "{{ one }}", x: '{{ asset("warehouse/patients").day }}'},
               code: "result = [one, x]"}
    """
    state = await made(text.replace("\\n    ", "\\n"))
    assert state.status == "COMPLETED", state.error
    assert [one["data"] for one in state.latest["start"].envelope["results"]] == [
        [2, "2026-01-02"],
        [1, "2026-01-02"],
    ]


async def test_the_admission_and_the_checks_of_a_step_see_what_it_reads(made: Any) -> None:
    await made(MAKER, {"value": 3})
    text = (
        READER % ""
        + """    spec: {admit: "{{ patients.value > 3 }}"}
"""
    )
    assert "start" not in (await made(text)).latest
    text = (
        READER % ""
        + """    checks: [{name: same, when: "{{ output == patients.value }}"}]
"""
    )
    state = await made(text)
    assert state.checks_of("start", 1)[0].passed


async def test_what_was_read_stays_the_same_for_who_resumes_the_step(made: Any, engine: Engine) -> None:
    await made(MAKER, {"value": 1})
    flow = playbook(READER % "")
    execution = await engine.lifecycle.create(flow)
    async with engine.steps.entering(execution, "start"):
        pass  # its process dies here
    await made(MAKER, {"value": 2})
    resumed = await engine.lifecycle.resume(execution.id)
    await engine.walker.run(resumed)
    assert value(resumed.state) == 1


async def test_an_asset_of_elsewhere(engine: Engine) -> None:
    async def elsewhere(key: tuple[str, ...], partition: str | None) -> dict[str, Any] | None:
        if key != ("warehouse", "patients"):
            return None
        return {
            "asset": "warehouse/patients",
            "partition": partition,
            "result": {"status": "ok", "data": {"value": 9}},
        }

    execution = await engine.lifecycle.create(playbook(READER % ""))
    assert value(await engine.drive(execution, services=RunServices(find_asset=elsewhere))) == 9


async def test_the_names_of_the_partition(engine: Engine) -> None:
    text = """
    dagster: {partitions: {kind: daily, start: "2026-01-01", workload: day}}
    workload: {day: none}
    workflow:
      - step: start
        tool: {kind: python, input: {it: "{{ [day, partition.key, partition.start, partition.end] }}"},
               code: "result = it"}
    """
    day = PartitionKey(key="2026-01-01", start="2026-01-01T00:00:00+00:00", end="2026-01-02T00:00:00+00:00")
    execution = await engine.lifecycle.create(
        playbook(text), partition=Partition(key="2026-01-01", parts={"partition": day})
    )
    await engine.walker.run(execution)
    assert value(execution.state) == ["2026-01-01", "2026-01-01", day.start, day.end]
