"""Dagster Pipes: what jobs outside tell appears in the run that started them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from tests.compiler.conftest import DagsterRunResult
from tests.playbooks import playbook

FLOW = """
workload: {{job: "", messages: true}}
workflow:
  - step: start
    tool:
      kind: shell
      pipes: {pipes}
      env: {{BUCKET_URL: "{endpoint}", BUCKET_KEY: "{key}", BUCKET_SECRET: "{secret}"}}
      cmds: "{python} {job}"
    next:
      - {{step: other, when: "{{{{ start.exit_code == 0 }}}}"}}
      - {{step: never}}
  - step: other
    tool: {{kind: shell, cmds: "env | grep -c DAGSTER_PIPES || true"}}
  - step: never
    tool: {{kind: noop}}
"""
JOB = """
    import os
    from dagster_pipes import PipesDefaultMessageWriter, PipesS3MessageWriter, open_dagster_pipes

    writer = PipesDefaultMessageWriter()
    if {objects}:
        import boto3
        client = boto3.client(
            "s3", endpoint_url=os.environ["BUCKET_URL"], aws_access_key_id=os.environ["BUCKET_KEY"],
            aws_secret_access_key=os.environ["BUCKET_SECRET"], region_name="us-east-1",
        )
        writer = PipesS3MessageWriter(client, interval=0.2)
    with open_dagster_pipes(message_writer=writer) as pipes:
        pipes.log.info(f"job of {{pipes.extras['step']}} for {{pipes.asset_key}}")
        pipes.report_asset_materialization(metadata={{"rows": 7, "table": {{"raw_value": "a|b", "type": "md"}}}})
        pipes.report_asset_check("fine", passed=True, metadata={{"of": 7}})
"""


@pytest.fixture
def flow(settings: Settings, tmp_path: Path) -> Callable[..., str]:
    def flow(pipes: str, objects: bool) -> str:
        job = tmp_path / "job.py"
        job.write_text(dedent(JOB).format(objects=objects))
        return FLOW.format(
            pipes=pipes,
            endpoint=settings.minio_endpoint,
            key=settings.minio_access_key,
            secret=settings.minio_secret_key.get_secret_value(),
            python=sys.executable,
            job=job,
        )

    return flow


def metadata_of(instance: DagsterInstance, *key: str) -> dict[str, Any]:
    event = instance.get_latest_materialization_event(AssetKey(key))
    assert event is not None
    assert event.asset_materialization is not None
    return {name: one.value for name, one in event.asset_materialization.metadata.items()}


@pytest.mark.parametrize("pipes", ["true", "file", "objects"])
def test_a_job_tells_the_run_what_it_does(
    launch: Callable[..., DagsterRunResult],
    flow: Callable[..., str],
    dagster_instance: DagsterInstance,
    settings: Settings,
    pipes: str,
) -> None:
    ran = launch(flow(pipes, pipes == "objects"))
    assert ran.result.success
    assert set(ran.state.latest) == {"start", "other"}, "arcs that do not fire have no output"
    logged = [one.user_message for one in dagster_instance.all_logs(ran.result.run_id)]
    assert "job of start for tests/sample/start" in logged
    own = metadata_of(dagster_instance, "tests", "sample", "start")
    assert (own["rows"], own["table"]) == (7, "a|b")
    assert own["execution"] == str(ran.state.execution_id)
    (check,) = ran.result.get_asset_check_evaluations()
    assert (check.check_name, check.passed, check.metadata["of"].value) == ("fine", True, 7)
    assert ran.state.latest["other"].envelope["data"]["stdout"] == "0\n", "who does not ask for it has none"


def test_ways_of_messages_are_checked(launch: Callable[..., DagsterRunResult], flow: Callable[..., str]) -> None:
    ran = launch(flow("kafka", False))
    assert "pipes is true, file or objects, not 'kafka'" in str(ran.state.latest["start"].error)


async def test_without_dagster_the_job_runs_all_the_same(settings: Settings, flow: Callable[..., str]) -> None:
    engine = await Engine.open(settings)
    try:
        state = await engine.run(playbook(flow("true", False)))
    finally:
        await engine.close()
    assert state.status == "COMPLETED", state.error


EACH = """
workflow:
  - step: each
    loop: {{in: "{{{{ range(3) | list }}}}", iterator: n, spec: {{mode: parallel}}}}
    spec: {spec}
    tool: {{kind: script, pipes: true, interpreter: {python}, args: ["{{{{ n }}}}"], code: {code!r}}}
"""


@pytest.mark.parametrize("spec", ["{}", "{loop_mode: fanout, fanout: {max_groups: 3, max_concurrent: 1}}"])
def test_each_item_of_a_loop_is_heard(
    spec: str, launch: Callable[..., DagsterRunResult], dagster_instance: DagsterInstance
) -> None:
    code = (
        "import sys; from dagster_pipes import open_dagster_pipes\n"
        "with open_dagster_pipes() as pipes: pipes.report_asset_materialization(metadata={'n' + sys.argv[1]: 1})"
    )
    ran = launch(EACH.format(python=sys.executable, code=code, spec=spec))
    assert ran.result.success, ran.state.error
    assert {"n0", "n1", "n2"} <= metadata_of(dagster_instance, "tests", "sample", "each").keys()
