"""What playbooks ask of pods becomes dagster-k8s' own tags; without a cluster the steps run all the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from dagster import DagsterInstance, DagsterInvalidConfigError, JobDefinition
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run
from dagster_k8s.job import get_user_defined_k8s_config

from noetl_dagster.code_location.launch import launch
from noetl_dagster.compiler.names import POD_TAG
from noetl_dagster.compiler.specs import config_of
from noetl_dagster.engine.executions.spark_ahead import spark_steps_ahead
from noetl_dagster.playbook.pods import Amount, Pod
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from tests.definitions import definitions_of
from tests.playbooks import playbook

ASKING = """
executor:
  spec:
    kubernetes: {memory: {request: 2Gi, limit: 4Gi}, service_account: etl, labels: {team: data}}
workflow:
  - step: start
    tool: {kind: noop}
    next: [train]
  - step: train
    loop: {in: [1, 2, 3], iterator: n}
    spec: {loop_mode: fanout, kubernetes: {gpu: 1, memory: 8Gi, env: {A: b}, env_from: {secrets: [keys]}}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
    next: [end]
  - step: end
    spec: {kubernetes: true}
    tool: {kind: python, input: {found: "{{ train.results }}"}, code: "result = sum(found)"}
"""

PYTHON_ONLY = """
import sys
from tests.definitions import definitions_of
from noetl_dagster.playbook.pods import Amount, Pod
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from tests.playbooks import playbook

text = "workflow: [{step: start, tool: {kind: noop}}]"
definitions_of([playbook(text)], EngineProvider(Settings())).resolve_job_def("sample")
sys.exit("dagster_k8s" in sys.modules or "kubernetes" in sys.modules)
"""


def job_of(text: str, noetl: EngineProvider) -> JobDefinition:
    return definitions_of([playbook(text)], noetl).resolve_job_def("sample")


def test_a_run_and_its_ops_say_what_their_pods_are_like(noetl: EngineProvider) -> None:
    job = job_of(ASKING, noetl)
    run = get_user_defined_k8s_config(job.run_tags)
    assert run.container_config == {
        "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "4Gi"}},
    }
    assert run.pod_spec_config == {"service_account_name": "etl"}
    assert run.pod_template_spec_metadata == {"labels": {"team": "data"}}

    graph = job.graph.node_dict["sample_playbook"].definition
    ops = {name: node.definition.tags for name, node in graph.node_dict.items()}
    asking = {name for name, tags in ops.items() if POD_TAG in tags}
    assert asking == {"train_group", "end"}
    group = get_user_defined_k8s_config(ops["train_group"])
    assert group.container_config == {
        "resources": {
            "requests": {"memory": "8Gi", "nvidia.com/gpu": "1"},
            "limits": {"memory": "8Gi", "nvidia.com/gpu": "1"},
        },
        "env": [{"name": "A", "value": "b"}],
        "env_from": [{"secret_ref": {"name": "keys"}}],
    }
    assert group.pod_spec_config == {"service_account_name": "etl"}
    assert json.loads(ops["end"][POD_TAG]) == json.loads(job.run_tags[POD_TAG])


def test_a_request_alone_is_the_limit_too() -> None:
    """Else the launcher's limit would stay, which may be less."""
    pod = Pod(memory=Amount(request="4Gi"), cpu=Amount(limit="2"))
    assert config_of(pod)["container_config"]["resources"] == {
        "requests": {"memory": "4Gi", "cpu": "2"},
        "limits": {"memory": "4Gi", "cpu": "2"},
    }


def test_a_cycle_gets_the_pod_that_one_of_its_steps_asks_for(noetl: EngineProvider) -> None:
    text = """
    workflow:
      - {step: start, tool: {kind: noop}, next: [{step: again}]}
      - {step: again, tool: {kind: noop}, spec: {kubernetes: {cpu: 2}}, next: [{step: start, when: false}]}
    """
    graph = job_of(text, noetl).graph.node_dict["sample_playbook"].definition
    [region] = graph.node_dict.values()
    assert get_user_defined_k8s_config(region.definition.tags).container_config == {
        "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "2"}}
    }


def test_without_a_cluster_the_steps_run_in_the_runs_process(
    noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    execution_id = noetl.engine().runtime.ids.next()
    done = launch(playbook(ASKING), noetl, dagster_instance, execution_id=execution_id)
    assert done.success
    state = run_sync(noetl.engine().runtime.load(execution_id)).state
    assert state.latest["end"].envelope["data"] == 6


def test_who_asks_for_no_pod_imports_nothing_of_kubernetes() -> None:
    assert subprocess.run([sys.executable, "-c", PYTHON_ONLY], check=False).returncode == 0


def test_spark_is_not_started_ahead_for_a_step_that_has_a_pod(noetl: EngineProvider) -> None:
    text = """
    workflow:
      - {step: start, tool: {kind: noop}, next: [there]}
      - {step: there, spec: {kubernetes: POD}, tool: {kind: spark, sql: SELECT 1}}
    """
    for said, expected in (("false", ["there"]), ("{memory: 8Gi}", [])):
        execution = run_sync(noetl.engine().lifecycle.create(playbook(text.replace("POD", said))))
        assert spark_steps_ahead(execution) == expected


def test_the_config_for_pods_of_every_step_is_that_of_dagster_k8s(
    noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    job = job_of("workflow: [{step: start, tool: {kind: noop}}]", noetl)
    config = {"execution": {"config": {"kubernetes": {"max_concurrent": 2, "job_imago": "x"}}}}
    run = dagster_instance.create_run_for_job(job, run_config=config)
    with pytest.raises(DagsterInvalidConfigError, match="job_imago"):
        execute_run(InMemoryJob(job), run, dagster_instance, raise_on_error=True)
