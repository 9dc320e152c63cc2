"""Containers and pods that ask for rights of their host, of other accounts and of other Secrets."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import orjson
import pytest

from noetl_dagster.compiler.specs import op_tags, run_tags
from noetl_dagster.errors import PlaybookError, Problem, ProblemKind, ToolError
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.models import Task
from noetl_dagster.playbook.permissions import refused
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.setting_types import POD_RIGHTS
from noetl_dagster.settings import Settings, get_settings
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.commands import jobs
from noetl_dagster.tools.registry import tool_for
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import cluster, connected
from tests.waiting import until

__all__ = ["cluster", "connected"]

TOKEN = "tok-0123456789"

ASKED: dict[str, dict[str, Any]] = {
    "hostPath:/var/run": {"volumes": [{"name": "host", "hostPath": {"path": "/var/run"}}]},
    "secret:noetl-env": {"env_from": [{"secretRef": {"name": "noetl-env"}}]},
    "secret:noetl-key": {"env": [{"name": "K", "valueFrom": {"secretKeyRef": {"name": "noetl-key", "key": "k"}}}]},
    "secret:mounted": {"volumes": [{"name": "keys", "secret": {"secretName": "mounted"}}]},
    "secret:inner": {"volumes": [{"name": "p", "projected": {"sources": [{"secret": {"name": "inner"}}]}}]},
    "volume:serviceAccountToken": {
        "volumes": [{"name": "p", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]
    },
    "volume:nfs": {"volumes": [{"name": "n", "nfs": {"server": "files", "path": "/"}}]},
    "volume:csi": {"volumes": [{"name": "n", "csi": {"driver": "host"}}]},
    "serviceAccount:admin": {"service_account": "admin"},
    "privileged": {"security_context": {"privileged": True}},
    "allowPrivilegeEscalation": {"security_context": {"allowPrivilegeEscalation": True}},
    "capability:SYS_ADMIN": {"security_context": {"capabilities": {"add": ["CAP_SYS_ADMIN"]}}},
    "procMount": {"security_context": {"procMount": "Unmasked"}},
    "seccompProfile:Unconfined": {"security_context": {"seccompProfile": {"type": "Unconfined"}}},
    "appArmorProfile:Unconfined": {"security_context": {"appArmorProfile": {"type": "Unconfined"}}},
    "appArmorProfile:unconfined": {
        "annotations": {"container.apparmor.security.beta.kubernetes.io/main": "unconfined"}
    },
    "runAsRoot": {"security_context": {"runAsNonRoot": False}},
    "seLinuxOptions": {"security_context": {"seLinuxOptions": {"type": "spc_t"}}},
    "windowsOptions": {"security_context": {"windowsOptions": {"hostProcess": True}}},
}

HARMLESS = {
    "command": "echo of $WORD",
    "env": [
        {"name": "WORD", "value": "ours"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "env_from": [{"configMapRef": {"name": "plain", "optional": True}}],
    "volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "config", "configMap": {"name": "c", "optional": True}}],
    "volume_mounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "security_context": {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "runAsUser": 0,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}


@pytest.fixture
def allowed(strict: ToolContext, connected: None) -> Any:
    """Sets ``NOETL_CONTAINER_ALLOW`` of a toolbox that reaches the cluster."""

    def allow(*rights: str) -> None:
        strict.settings = strict.settings.model_copy(update={"container_allow": rights})

    allow()
    return allow


async def test_rights_are_refused_before_a_job_is_made(run: Any, allowed: Any, cluster: Cluster) -> None:
    for right, fields in ASKED.items():
        allowed(*(other for other in ASKED if other != right))
        with pytest.raises(ToolError, match="does not allow") as caught:
            await run("container", image="busybox", command="true", **fields)
        assert caught.value.kind == "auth"
        assert f"add {right} to NOETL_CONTAINER_ALLOW" in str(caught.value)
        assert not cluster.store.list("Job")


@pytest.mark.parametrize(("right", "fields"), ASKED.items())
def test_a_right_that_is_allowed_is_not_refused(right: str, fields: dict[str, Any]) -> None:
    call = ToolCall(7, "work", Task(name="t", kind="container"), {"image": "busybox", **fields}, {})
    template = jobs.job_manifest(call)["spec"]["template"]
    pod, annotations = template["spec"], template["metadata"].get("annotations")
    assert refused(pod, [right], annotations) == refused(pod, [right.partition(":")[0]], annotations) == []
    assert [str(one) for one in refused(pod, [], annotations)] == [right]


@pytest.mark.parametrize(
    ("path", "allowed", "fits"),
    [
        ("/data", "hostPath:/data", True),
        ("/data/x/", "hostPath:/data", True),
        ("/data/../etc", "hostPath:/data", False),
        ("/database", "hostPath:/data", False),
        ("/", "hostPath:/data", False),
        ("//data/../..", "hostPath:/data", False),
        ("/etc", "hostPath", True),
        ("/data", "secret:/data", False),
    ],
)
def test_paths_of_the_host(path: str, allowed: str, fits: bool) -> None:
    pod = {"volumes": [{"name": "v", "hostPath": {"path": path}}]}
    assert (not refused(pod, [allowed])) == fits


@pytest.mark.parametrize("name", ["hostNetwork", "hostPID", "hostIPC"])
def test_namespaces_of_the_host(name: str) -> None:
    assert [str(one) for one in refused({name: True}, ())] == [name]
    assert not refused({name: True}, [name])


def test_every_right_is_known_to_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {right.partition(":")[0] for right in ASKED} | {"hostNetwork", "hostPID", "hostIPC"} == set(POD_RIGHTS)
    monkeypatch.setenv("NOETL_CONTAINER_ALLOW", " hostPath:/data, privileged ,")
    assert Settings().container_allow == ("hostPath:/data", "privileged")
    monkeypatch.setenv("NOETL_CONTAINER_ALLOW", '["secret:keys"]')
    assert Settings().container_allow == ("secret:keys",)
    monkeypatch.setenv("NOETL_CONTAINER_ALLOW", "hostpath")
    with pytest.raises(ValueError, match="'hostpath' is unknown; write one of hostPath"):
        Settings()


async def test_a_container_without_rights_runs(run: Any, allowed: Any, cluster: Cluster) -> None:
    found = (await run("container", image="busybox", **HARMLESS)).data
    assert found["stdout"] == "of ours\n"


async def test_an_annotation_does_not_name_a_secret_as_the_jobs_own(run: Any, allowed: Any, cluster: Cluster) -> None:
    with pytest.raises(ToolError, match="secret:noetl-env"):
        await run(
            "container",
            image="busybox",
            command="env",
            annotations={jobs.SECRET: "noetl-env"},
            env_from=[{"secretRef": {"name": "noetl-env"}}],
        )
    assert not cluster.store.list("Job")


async def test_secret_variables_are_in_a_secret_that_the_job_owns(run: Any, allowed: Any, cluster: Cluster) -> None:
    SECRETS.hide(TOKEN)
    env = {"PLAIN": "shown", "TOKEN": TOKEN, "URL": f"https://u:{TOKEN}@api"}
    running = asyncio.create_task(
        run("container", image="busybox", command="echo $PLAIN ${#TOKEN} ${#URL}; sleep 1000", env=env)
    )
    await until(lambda: f"shown {len(TOKEN)} {len(env['URL'])}" in cluster.said(), "output")
    [job], [secret] = cluster.store.list("Job"), cluster.store.list("Secret")
    assert TOKEN not in orjson.dumps([job, *cluster.pods()]).decode()
    assert {name: base64.b64decode(text).decode() for name, text in secret["data"].items()} == {
        "TOKEN": TOKEN,
        "URL": env["URL"],
    }
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not cluster.store.list("Secret"), "the Secret's end")


async def test_a_secret_that_a_killed_process_did_not_make_is_made(
    allowed: Any, box: ToolContext, cluster: Cluster
) -> None:
    """The process died between the job and its Secret; a token was renewed since."""
    SECRETS.hide(TOKEN)

    def call(token: str) -> ToolCall:
        config = {"image": "busybox", "command": "echo $TOKEN | wc -c", "env": {"TOKEN": token}}
        return ToolCall(7001, "stage", Task(name="task_0", kind="container", config=config), config, {})

    old = call("old")
    job = cluster.create(jobs.job_manifest(old, secrets={"TOKEN": "old"}))
    found = (await tool_for("container").run(call(TOKEN), box)).data
    assert found["stdout"].split() == [str(len(TOKEN) + 1)]
    assert found["job"] == job["metadata"]["name"]


PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: pods, path: pods}
executor: {spec: EXECUTOR}
workflow:
  - step: work
    spec: {kubernetes: POD}
    tool: TOOL
"""


def problems(tool: str = "{kind: noop}", pod: str = "false", executor: str = "{}") -> tuple[Any, list[Problem]]:
    text = PLAYBOOK.replace("TOOL", tool).replace("POD", pod).replace("EXECUTOR", executor)
    playbook, found = parse_report(text, file="pods.yaml")
    return playbook, [problem for problem in found if problem.kind is ProblemKind.RIGHT_NOT_ALLOWED]


@pytest.fixture
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NOETL_CONTAINER_ALLOW", "")
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


@pytest.mark.usefixtures("nothing_allowed")
@pytest.mark.parametrize(("right", "fields"), ASKED.items())
def test_check_warns_about_a_right(right: str, fields: dict[str, Any]) -> None:
    _, [found] = problems(orjson.dumps({"kind": "container", "image": "x", **fields}).decode())
    assert (found.severity, found.place.line) == ("warning", 9)
    assert right in found.message


@pytest.mark.usefixtures("nothing_allowed")
def test_check_leaves_templates_to_the_run() -> None:
    assert problems('{kind: container, image: x, service_account: "{{ account }}"}')[1] == []


@pytest.mark.usefixtures("nothing_allowed")
@pytest.mark.parametrize("fields", ["{service_account: admin}", "{env_from: {secrets: [noetl-env]}}"])
def test_pods_of_runs_and_steps_ask_for_rights_too(fields: str) -> None:
    playbook, [found] = problems(pod=fields)
    assert found.severity == "warning"
    with pytest.raises(PlaybookError, match="NOETL_CONTAINER_ALLOW"):
        op_tags(playbook, ["work"])
    playbook, [found] = problems(executor=f"{{kubernetes: {fields}}}")
    with pytest.raises(PlaybookError, match="NOETL_CONTAINER_ALLOW"):
        run_tags(playbook)


def test_the_chart_lets_containers_make_secrets_but_not_read_them() -> None:
    rights = Path("helm/noetl-dagster/templates/_rights.tpl").read_text()
    assert "resources: [secrets], verbs: [create]}" in rights
