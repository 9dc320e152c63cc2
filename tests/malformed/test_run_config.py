"""Run config and tags with which a job is launched, from the Launchpad or ``dagster job launch``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dagster import DagsterInstance, DagsterInvalidConfigError, DagsterRunStatus
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import create_execution_plan, execute_run

from noetl_dagster.compiler.runs import EXECUTION_TAG, RESUME_EPOCH_TAG
from noetl_dagster.resources.engines import EngineProvider
from tests.definitions import definitions_of
from tests.playbooks import playbook

FLOW = """
workload: {n: 1, rows: [a], deep: {a: 1}, text: one}
dagster: {DAGSTER}
workflow: [{step: start, tool: {kind: noop}}]
"""
DAILY = "partitions: {kind: daily, start: 2026-01-01, end: 2026-01-03}"
STATIC = "partitions: {static: [a, b]}"


def workload(**values: Any) -> dict[str, Any]:
    return {"ops": {"sample_playbook": {"config": values}}}


def executor(name: str, **config: Any) -> dict[str, Any]:
    return {"execution": {"config": {name: config}}}


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown section": ({"op": {}}, '"op" at the root'),
    "ops of the wrong type": ({"ops": []}, "root:ops must be dict"),
    "an unknown op": ({"ops": {"other": {}}}, '"other" at path root:ops'),
    "an unknown key": ({"ops": {"sample_playbook": {"workload": {}}}}, '"workload" at path'),
    "a workload that is a list": ({"ops": {"sample_playbook": {"config": []}}}, ":config must be dict"),
    "a number of the wrong type": (workload(n="x"), ":config:n"),
    "a number that is null": (workload(n=None), ":config:n must not be None"),
    "a list of the wrong type": (workload(rows="x"), ":config:rows must be list"),
    "items of the wrong type": (workload(rows=[1]), ":config:rows[0]"),
    "a mapping of the wrong type": (workload(deep="x"), ":config:deep must be dict"),
    "a text of the wrong type": (workload(text={}), ":config:text"),
    "an unknown executor": (executor("rocket"), "rocket"),
    "two executors": ({"execution": {"config": {"threaded": {}, "in_process": {}}}}, "root:execution:config"),
    "processes that are none": (executor("threaded", processes="many"), "config:threaded:processes"),
    "an unknown logger": ({"loggers": {"printer": {}}}, '"printer" at path root:loggers'),
    "an unknown resource": ({"resources": {"x": {}}}, '"x" at path root:resources'),
}
"""Run config with which no run begins, and what the message names."""

STARTED: dict[str, tuple[dict[str, Any], str]] = {
    "half a surrogate": (workload(text="\ud800"), "workload.text holds half of a surrogate pair"),
    "a number of 71 bits": (workload(n=2**70), "workload.n is an integer beyond 64 bits"),
    "a number of 71 bits inside": (workload(more={"a": [2**70]}), "workload.more.a[0] is an integer beyond 64 bits"),
    "deep lists": (workload(more=json.loads("[" * 250 + "]" * 250)), "deeper than 200 levels"),
    "negative processes": (executor("threaded", processes=-1), "processes is -1; write from 0 to 1024"),
    "too many processes": (executor("in_process", processes=2**40), "processes is 1099511627776"),
    "negative concurrency": (executor("threaded", max_concurrent=-1), "threaded: max_concurrent is -1"),
    "negative concurrency of processes": (executor("multiprocess", max_concurrent=-1), "max_concurrent is -1"),
}
"""Run config with which the run fails before the execution begins."""

TAGS: dict[str, tuple[dict[str, str], str]] = {
    **{
        f"execution {value:.20}": ({EXECUTION_TAG: value, RESUME_EPOCH_TAG: "2"}, f"run tag {EXECUTION_TAG} is ")
        for value in ("x", "", "0", "-1", "1.5", "²", "9" * 19, "9" * 5_000)
    },
    "an execution of a retry": ({EXECUTION_TAG: "x", "dagster/is_resume_retry": "true"}, "no execution"),
}
PARTITION_TAGS: dict[str, tuple[str, dict[str, str], str]] = {
    "no partition": (STATIC, {}, "playbook sample has partitions"),
    "a day beyond the last": (DAILY, {"dagster/partition": "2027-01-01"}, "they are from 2026-01-01 to 2026-01-02"),
    **{
        f"partition {value!a:.20}": (STATIC, {"dagster/partition": value}, "there are a, b")
        for value in ("", "x", "a ", "a\0", "a|b", "x" * 100_000)
    },
}


def launched(
    noetl: EngineProvider, instance: DagsterInstance, config: dict[str, Any], tags: dict[str, str], partitions: str = ""
) -> str:
    """Launches the job, and returns why its run failed. Nothing of an execution is in the log."""
    job = definitions_of([playbook(FLOW.replace("DAGSTER", partitions))], noetl).resolve_job_def("sample")
    plan = create_execution_plan(job, config, instance_ref=instance.get_ref(), tags=tags)
    run = instance.create_run_for_job(job_def=job, execution_plan=plan, run_config=config, tags=tags)
    result = execute_run(InMemoryJob(job), run, instance, raise_on_error=False)
    ended = instance.get_run_by_id(run.run_id)
    assert ended is not None
    assert ended.status is DagsterRunStatus.FAILURE, result.all_events
    pool = noetl.engine().runtime.pool
    assert noetl.run(pool.fetchval("SELECT count(*) FROM noetl.event")) == 0
    errors = [getattr(event.event_specific_data, "error", None) for event in result.all_events if event.is_failure]
    return "\n".join(error.to_string() for error in errors if error is not None)


@pytest.mark.parametrize(("config", "named"), CONFIGS.values(), ids=CONFIGS)
def test_no_run_begins(
    config: dict[str, Any], named: str, noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    with pytest.raises(DagsterInvalidConfigError) as caught:
        launched(noetl, dagster_instance, config, {})
    assert named in str(caught.value)
    assert dagster_instance.get_runs_count() == 0


@pytest.mark.parametrize(("config", "named"), STARTED.values(), ids=STARTED)
def test_the_run_fails(
    config: dict[str, Any], named: str, noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    assert named in launched(noetl, dagster_instance, config, {})


@pytest.mark.parametrize(("tags", "named"), TAGS.values(), ids=TAGS)
def test_tags(tags: dict[str, str], named: str, noetl: EngineProvider, dagster_instance: DagsterInstance) -> None:
    assert named in launched(noetl, dagster_instance, {}, tags)


@pytest.mark.parametrize(("partitions", "tags", "named"), PARTITION_TAGS.values(), ids=PARTITION_TAGS)
def test_partitions(
    partitions: str, tags: dict[str, str], named: str, noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    assert named in launched(noetl, dagster_instance, {}, tags, partitions)
