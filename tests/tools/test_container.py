"""The container tool, in a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.setting_types import PodTemplate
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.commands import jobs
from noetl_dagster.tools.commands.cluster import StartProblem
from noetl_dagster.tools.commands.processes import OUTPUT_BYTES
from tests.helm.chart import KIND, manifests, of_kind
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.conftest import cluster, connected
from tests.waiting import until

__all__ = ["cluster", "connected"]

pytestmark = pytest.mark.usefixtures("connected")


async def test_a_container_runs_to_its_end(run: Any, cluster: Cluster) -> None:
    found = (await run("container", image="busybox", command="echo of $WORD", env={"WORD": "ours"})).data
    assert (found["stdout"], found["exit_code"]) == ("of ours\n", 0)
    assert not cluster.store.list("Job")


async def test_a_container_that_fails_says_what_it_wrote(run: Any, cluster: Cluster) -> None:
    with pytest.raises(ToolError, match="exit code 3: broken") as raised:
        await run("container", image="busybox", command="echo broken; exit 3")
    assert raised.value.code == 3
    assert not cluster.store.list("Job")


async def test_of_a_long_log_the_end_is_kept(run: Any) -> None:
    script = "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the end"
    found = (await run("container", image="busybox", command=script)).data
    note, _, log = found["stdout"].partition("\n")
    assert note == "[the first 1,951,433 bytes are left out; write long output to a file]"
    assert log.endswith("\nthe end\n")
    assert len(log) == OUTPUT_BYTES


async def test_a_container_of_the_chart_runs_restricted_and_with_the_release_s_labels(
    run: Any, box: ToolContext, cluster: Cluster
) -> None:
    settings = of_kind(manifests(KIND), "ConfigMap")["trial-noetl-dagster-settings"]["data"]
    pod = PodTemplate.model_validate_json(settings["NOETL_CONTAINER_POD"])
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trial-noetl-dagster-container"}}
    cluster.create(account)
    box.settings = box.settings.model_copy(update={"container_pod": pod})
    running = asyncio.create_task(run("container", image="busybox", command="echo ours; sleep 1000"))
    await until(lambda: "ours\n" in cluster.said(), "output")
    [made], [job] = cluster.pods(), cluster.store.list("Job")
    assert job["spec"]["activeDeadlineSeconds"] == 86_400
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    policies = of_kind(manifests(KIND), "NetworkPolicy")["trial-noetl-dagster-container"]["spec"]
    assert policies["podSelector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    spec = made["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


async def test_without_the_right_to_create_jobs_the_value_of_the_chart_is_named(run: Any, cluster: Cluster) -> None:
    cluster.kubeconfig.write_text(cluster.config_of(cluster.rights.token("default", "default"), "default"))
    with pytest.raises(ToolError, match=r"403 Forbidden: .*; the Helm chart gives the right .* with runs\.containers"):
        await run("container", image="busybox", command="true")


async def test_a_field_that_kubernetes_does_not_know_is_not_ignored(
    run: Any, box: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = PodTemplate.model_validate({"spec": {"securityContxt": {"runAsNonRoot": True}}})
    box.settings = box.settings.model_copy(update={"container_pod": pod})
    asked: list[Any] = []
    create = kubernetes.client.BatchV1Api.create_namespaced_job

    def noted(*arguments: Any, **options: Any) -> Any:
        asked.append(options.get("field_validation"))  # without it, a cluster only warns
        return create(*arguments, **options)

    monkeypatch.setattr(kubernetes.client.BatchV1Api, "create_namespaced_job", noted)
    with pytest.raises(ToolError, match="securityContxt"):
        await run("container", image="busybox", command="true")
    assert asked == ["Strict"]


async def test_a_container_that_takes_too_long_is_ended(run: Any, cluster: Cluster) -> None:
    with pytest.raises(ToolError) as raised:
        await run("container", image="busybox", command="sleep 1000", timeout=1)
    assert raised.value.kind == "timeout"
    assert not cluster.store.list("Job")


@pytest.mark.parametrize(
    ("given", "said", "kind"),
    [
        (
            {"image": "missing/tool:1"},
            r'pod noetl-\S+ does not start for 0 s: ImagePullBackOff: Back-off pulling image "missing/tool:1"; check the',
            "not_found",
        ),
        ({"image": "missing/Tool"}, r"does not start: InvalidImageName: .*; correct the name", "schema"),
        (
            {"image": "busybox", "env_from": [{"secretRef": {"name": "absent"}}]},
            r"CreateContainerConfigError: .*absent.*; create the Secret or ConfigMap",
            "not_found",
        ),
        (
            {"image": "busybox", "service_account": "absent"},
            r"it has no pod for 0 s: FailedCreate: Error creating: .*absent.*; ask the administrators",
            "auth",
        ),
    ],
    ids=["image", "name", "secret", "account"],
)
async def test_a_job_that_does_not_start_says_why(
    run: Any, box: ToolContext, cluster: Cluster, given: dict[str, Any], said: str, kind: str
) -> None:
    box.settings = box.settings.model_copy(
        update={"container_start_seconds": 0.2, "container_allow": ("secret:absent", "serviceAccount:absent")}
    )
    with pytest.raises(ToolError, match=said) as raised:
        await run("container", command="true", **given)
    assert raised.value.kind == kind
    await until(lambda: not cluster.store.list("Job"))


def test_a_quota_is_no_matter_of_rights() -> None:
    message = (
        'Error creating: pods "x" is forbidden: exceeded quota: team, requested: cpu=1, used: cpu=4, limited: cpu=4'
    )
    error = StartProblem("FailedCreate", message, "").error("container", 600)
    assert (error.kind, error.retryable) == ("rate_limit", True)


async def test_a_job_waits_for_what_passes(run: Any, box: ToolContext, cluster: Cluster) -> None:
    box.settings = box.settings.model_copy(
        update={"container_start_seconds": 1000.0, "container_allow": ("secret:late",)}
    )
    notes: list[str] = []
    box.progress = lambda call, note: notes.append(note)
    secret = [{"secretRef": {"name": "late"}}]
    running = asyncio.create_task(run("container", image="busybox", command="echo $KEY", env_from=secret))
    await until(lambda: any("waits: CreateContainerConfigError" in note for note in notes))
    made = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "late"}, "stringData": {"KEY": "here"}}
    cluster.create(made)
    assert (await running).data["stdout"] == "here\n"


async def test_without_the_right_to_list_events_the_pods_are_known(
    run: Any, box: ToolContext, cluster: Cluster
) -> None:
    box.settings = box.settings.model_copy(update={"container_start_seconds": 0.2})

    def no_events(method: str, path: str) -> Refused | None:
        return Refused(403, "Forbidden", "events is forbidden") if path.endswith("/events") else None

    with cluster.refusing(no_events), pytest.raises(ToolError, match="ImagePullBackOff"):
        await run("container", image="missing/tool:1", command="true")


async def test_a_job_runs_in_the_namespace_of_the_kubeconfig(run: Any, cluster: Cluster) -> None:
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "runs"}})
    cluster.kubeconfig.write_text(cluster.config_of(cluster.rights.administrator, "runs"))
    found = (await run("container", image="busybox", command="true")).data
    assert found["namespace"] == "runs"


async def test_a_container_is_placed_and_fed_as_its_task_says(run: Any, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "word").write_text("mounted")
    core = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(str(cluster.kubeconfig)))
    core.create_namespaced_secret("default", {"metadata": {"name": "keys"}, "stringData": {"KEY": "hush"}})
    call = run(
        "container",
        image="busybox",
        command="echo $KEY $(cat /in/word) $(pwd); sleep 1000",
        env_from=[{"secretRef": {"name": "keys"}}],
        volumes=[{"name": "in", "hostPath": {"path": str(tmp_path)}}],
        volume_mounts=[{"name": "in", "mountPath": "/in", "readOnly": True}],
        working_dir="/in",
        node_selector={"disk": "fast"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        image_pull_policy="IfNotPresent",
        image_pull_secrets="registry",
        security_context={"readOnlyRootFilesystem": True},
        labels={"team": "care"},
        annotations={"cost/centre": 7},
    )
    running = asyncio.create_task(call)
    await until(lambda: "/in\n" in cluster.said(), "output")
    [pod] = cluster.pods()
    assert cluster.log(pod["metadata"]["name"]) == "hush mounted /in\n"
    spec, metadata = pod["spec"], pod["metadata"]
    assert (spec["nodeSelector"], spec["tolerations"]) == (
        {"disk": "fast"},
        [{"key": "gpu", "operator": "Exists"}],
    )
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["containers"][0]["imagePullPolicy"] == "IfNotPresent"
    assert (metadata["labels"]["team"], metadata["annotations"]["cost/centre"]) == ("care", "7")
    [job] = cluster.store.list("Job")
    assert jobs.SECRET not in job["metadata"]["annotations"], "no variable has a secret value"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
