"""The jobs of the container tool as they are created: names, limits, and what the installation adds."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.models import Task
from noetl_dagster.setting_types import PodTemplate
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.commands.jobs import MADE_OF, MARGIN_SECONDS, call_name, job_manifest, job_name


def call(**config: Any) -> ToolCall:
    config = {"image": "busybox", "command": "echo new", **config}
    task = Task(name="task_0", kind="container", config=config)
    return ToolCall(7, "stage", task, config, {}, command_id="7:stage:1:1")


def test_the_name_says_which_call_it_is_and_nothing_else() -> None:
    one = call()
    assert job_name(one) == job_name(call(env={"TRACEPARENT": "00-1"}))
    others = [call() for _ in range(4)]
    others[0].number = 2
    others[1].command_id = "7:stage:1:2"
    others[2].command_id = "7:stage:1:5:1"
    others[3].task = Task(name="other", kind="container", config={})
    assert len({job_name(one), *map(job_name, others)}) == 5
    long = call()
    long.step = "Ünder_the " + "x" * 19 + "_" + "y" * 60
    assert job_name(long).startswith("noetl-nder-the-xxxxxxxxxxxxxxxxxxx-")
    assert len(job_name(long)) <= 53
    assert call_name(one) == "7:stage:1:1/task_0/1"


def test_a_job_ends_by_itself_where_the_call_has_a_timeout() -> None:
    assert job_manifest(call(timeout="2.5"))["spec"]["activeDeadlineSeconds"] == 3 + MARGIN_SECONDS
    own = call(timeout=100)
    own.task = own.task.model_copy(update={"spec": own.task.spec.model_copy(update={"timeout": 10.0})})
    assert job_manifest(own)["spec"]["activeDeadlineSeconds"] == 10 + MARGIN_SECONDS
    limited = Settings(container_deadline_seconds=30)
    assert job_manifest(call(), settings=limited)["spec"]["activeDeadlineSeconds"] == 30
    assert job_manifest(call(timeout=100), settings=limited)["spec"]["activeDeadlineSeconds"] == 100 + MARGIN_SECONDS


RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


BASE = PodTemplate.model_validate(
    {
        "metadata": {"labels": {"team": "platform"}, "annotations": {"mesh": "off"}},
        "spec": {
            "serviceAccountName": "container",
            "automountServiceAccountToken": False,
            "priorityClassName": "low",
            "nodeSelector": {"pool": "jobs"},
            "tolerations": [{"key": "jobs"}],
            "imagePullSecrets": [{"name": "registry"}],
            "securityContext": {"runAsNonRoot": True},
            "containers": [
                {
                    "resources": {"limits": {"memory": "1Gi"}},
                    "securityContext": RESTRICTED,
                }
            ],
        },
    }
)


@pytest.mark.parametrize(
    ("own", "places"),
    [
        (
            {},
            {
                "spec.automountServiceAccountToken": False,
                "spec.serviceAccountName": "container",
                "spec.securityContext": {"runAsNonRoot": True},
                "spec.containers.0.resources": {"limits": {"memory": "1Gi"}},
                "spec.priorityClassName": "low",
            },
        ),
        ({"labels": {"team": "mine", "own": "1"}}, {"metadata.labels.team": "platform", "metadata.labels.own": "1"}),
        ({"annotations": {"mesh": "on"}}, {"metadata.annotations.mesh": "off"}),
        (
            {"node_selector": {"pool": "other", "disk": "fast"}},
            {"spec.nodeSelector": {"pool": "jobs", "disk": "fast"}},
        ),
        ({"tolerations": [{"key": "gpu"}]}, {"spec.tolerations": [{"key": "jobs"}, {"key": "gpu"}]}),
        ({"image_pull_secrets": "own"}, {"spec.imagePullSecrets": [{"name": "registry"}, {"name": "own"}]}),
        ({"service_account": "etl"}, {"spec.serviceAccountName": "etl", "spec.automountServiceAccountToken": True}),
        ({"namespace": "elsewhere"}, {"spec.serviceAccountName": None}),
        ({"resources": {"limits": {"cpu": "2"}}}, {"spec.containers.0.resources": {"limits": {"cpu": "2"}}}),
        (
            {"security_context": {"capabilities": {"drop": []}, "runAsUser": 7}},
            {"spec.containers.0.securityContext": {**RESTRICTED, "runAsUser": 7}},
        ),
        (
            {"security_context": {"allowPrivilegeEscalation": None, "capabilities": None}},
            {"spec.containers.0.securityContext": RESTRICTED},
        ),
        (
            {"security_context": {"capabilities": {"drop": None, "add": None}}},
            {"spec.containers.0.securityContext.capabilities": {"drop": ["ALL"]}},
        ),
        ({"node_selector": "a rendered text"}, {"spec.nodeSelector": {"pool": "jobs"}}),
    ],
)
def test_what_the_installation_says_of_pods_is_under_the_task_s(own: dict[str, Any], places: dict[str, Any]) -> None:
    manifest = job_manifest(call(**own), settings=Settings(container_pod=BASE))["spec"]["template"]
    for place, expected in places.items():
        value: Any = manifest
        for name in place.split("."):
            value = value[int(name)] if name.isdecimal() else value.get(name)
        assert value == expected, place


def test_a_pod_has_a_token_of_the_account_that_its_task_names() -> None:
    for own, has in (({}, False), ({"service_account": "etl"}, True)):
        assert job_manifest(call(**own))["spec"]["template"]["spec"]["automountServiceAccountToken"] is has


def test_a_job_goes_on_when_the_installation_changes_its_pods() -> None:
    made = {
        job_manifest(call(), settings=settings)["metadata"]["annotations"][MADE_OF]
        for settings in (None, Settings(container_pod=BASE))
    }
    assert len(made) == 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('{"spec": {"containers": [{}, {}]}}', "at most 1 item"),
        ('{"labels": {}}', "container_pod.labels"),
        ('{"metadata": {"labels": {"a": 1}}}', "container_pod.metadata.labels.a"),
        ("pod", "container_pod"),
    ],
)
def test_a_wrong_pod_of_the_installation_is_refused(value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOETL_CONTAINER_POD", value)
    with pytest.raises(ValueError, match=said):
        Settings()


def test_job_manifest() -> None:
    config = {
        "image": "busybox",
        "command": "echo $A",
        "args": ["x", True, None, [1, None]],
        "env": {"A": 1, "B": True, "C": None},
        "resources": {"limits": {"memory": "1Gi"}},
    }
    call = ToolCall(7, "Load_All data", Task(name="t", kind="container"), config, {})

    job = job_manifest(call)

    assert job["metadata"]["name"].startswith("noetl-load-all-data-")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["/bin/sh", "-c", "echo $A"]
    assert container["args"] == ["x", "true", "[1,null]"]
    assert container["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "true"}]
    piped = job_manifest(call, None, {"DAGSTER_PIPES_CONTEXT": "x"})["spec"]["template"]["spec"]["containers"][0]
    assert piped["env"][2:] == [{"name": "DAGSTER_PIPES_CONTEXT", "value": "x"}]
    with pytest.raises(ToolError, match="no 'image'"):
        job_manifest(ToolCall(7, "s", Task(name="t", kind="container"), {}, {}))
