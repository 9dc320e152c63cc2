"""Who may do what: containers, tokens, Roles."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.helm.chart import (
    KIND,
    MINIMAL,
    SCENARIOS,
    Manifest,
    Pods,
    component,
    manifests,
    of_kind,
    overlaid,
    pods_of,
)
from tests.helm.launched import run_pods
from tests.kubernetes.cluster.pod_security import violations
from tests.kubernetes.cluster.services import LATE_SECONDS

LONG_RUNNING = ("Deployment", "StatefulSet")


@pytest.fixture(params=SCENARIOS)
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    return manifests(SCENARIOS[request.param])


def all_pods(objects: list[Manifest]) -> list[Pods]:
    executors = [
        yaml.safe_load(one["data"]["executor.yaml"]) for one in objects if "executor.yaml" in one.get("data", {})
    ]
    spark = [Pods("Executor", "executor", one["metadata"]["labels"], one["spec"]) for one in executors]
    return [*pods_of(objects), run_pods(objects), *spark]


def test_pods_meet_the_restricted_standard(objects: list[Manifest]) -> None:
    for pods in all_pods(objects):
        assert violations(pods.spec) == [], pods.name
        assert pods.spec["securityContext"]["runAsUser"] >= 999
        assert pods.container["securityContext"]["readOnlyRootFilesystem"] is True


def test_pods_of_container_steps_meet_it_too() -> None:
    settings = of_kind(manifests(KIND), "ConfigMap")["trial-noetl-dagster-settings"]["data"]
    spec = yaml.safe_load(settings["NOETL_CONTAINER_POD"])["spec"]
    assert violations({**spec, "containers": [{"name": "main", **spec["containers"][0]}]}) == []


def test_our_processes_are_user_10001(objects: list[Manifest]) -> None:
    for pods in all_pods(objects):
        if pods.kind == "Executor" or pods.is_ours:
            context = pods.spec["securityContext"]
            assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (10001, 10001, 10001)


def test_there_is_room_to_write_where_processes_write(objects: list[Manifest]) -> None:
    for pods in all_pods(objects):
        writable = {mount["mountPath"] for mount in pods.container["volumeMounts"] if not mount.get("readOnly")}
        assert "/tmp" in writable
        if pods.kind != "Executor" and pods.is_ours:
            assert "/var/lib/noetl" in writable


def test_resources_are_set(objects: list[Manifest]) -> None:
    for pods in all_pods(objects):
        if pods.kind != "Executor":  # Spark sets them
            resources = pods.container["resources"]
            assert resources["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in resources["limits"]


def test_runs_have_limits_that_they_can_follow(objects: list[Manifest]) -> None:
    """Processes and Spark's driver fit into the limits of their pod, and into none that they cannot see."""
    container = run_pods(objects).container
    assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
    larger = run_pods(objects, {"container_config": {"resources": {"limits": {"cpu": "8", "memory": "32Gi"}}}})
    assert larger.container["resources"]["limits"].items() >= {"cpu": "8", "memory": "32Gi"}.items()
    assert "NOETL_RUN_PROCESSES" not in larger.variables(objects)


def test_what_runs_long_has_probes(objects: list[Manifest]) -> None:
    for pods in pods_of(objects):
        if pods.kind not in LONG_RUNNING:
            continue
        probes = {"startupProbe", "livenessProbe"} | ({"readinessProbe"} if pods.component != "daemon" else set())
        assert probes <= pods.container.keys(), pods.name
        ways = {way for probe in ("startup", "liveness") for way in pods.container[f"{probe}Probe"]}
        starts = pods.component in ("postgresql", "daemon")
        assert ("exec" in ways) == starts, f"{pods.name} starts a process for each probe"


def test_who_stops_has_time_to(objects: list[Manifest]) -> None:
    for pods in pods_of(objects):
        drain = float(pods.variables(objects).get("NOETL_WORKER_DRAIN_SECONDS", 0))
        assert pods.spec["terminationGracePeriodSeconds"] >= drain + 30


def test_who_is_behind_a_service_lingers_until_nodes_have_heard_that_it_leaves(objects: list[Manifest]) -> None:
    selectors = [one["spec"]["selector"] for one in of_kind(objects, "Service").values()]
    for pods in pods_of(objects):
        if pods.kind != "Deployment" or not any(one.items() <= pods.labels.items() for one in selectors):
            continue
        command, seconds = pods.container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        assert LATE_SECONDS < float(seconds) < pods.spec["terminationGracePeriodSeconds"], pods.name


def test_the_daemon_is_never_two(objects: list[Manifest]) -> None:
    for name, deployment in of_kind(objects, "Deployment").items():
        if name.endswith("-daemon"):
            assert deployment["spec"]["replicas"] == 1
            assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_no_drain_of_a_node_waits_for_ever(objects: list[Manifest]) -> None:
    for budget in of_kind(objects, "PodDisruptionBudget").values():
        assert budget["spec"]["maxUnavailable"] == 1


def tokens(objects: list[Manifest]) -> set[str]:
    return {pods.component for pods in all_pods(objects) if pods.spec["automountServiceAccountToken"]}


def rights(objects: list[Manifest]) -> dict[str, set[tuple[str, str]]]:
    """Account -> (resource, verb)."""
    roles, found = of_kind(objects, "Role"), dict[str, set[tuple[str, str]]]()
    for binding in of_kind(objects, "RoleBinding").values():
        may = {
            (resource, verb)
            for rule in roles[binding["roleRef"]["name"]]["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        for subject in binding["subjects"]:
            found.setdefault(subject["name"].removeprefix("trial-noetl-dagster-"), set()).update(may)
    return found


def test_accounts_have_no_token_by_themselves(objects: list[Manifest]) -> None:
    assert all(one["automountServiceAccountToken"] is False for one in of_kind(objects, "ServiceAccount").values())


def test_executors_are_pulled_and_placed_as_other_pods() -> None:
    values = {
        "image": {"tag": "9.9", "pullSecrets": [{"name": "registry"}]},
        "pod": {"tolerations": [{"key": "data", "operator": "Exists"}], "nodeSelector": {"disk": "fast"}},
        "spark": {"mode": "kubernetes"},
        "storage": {"pvc": {"enabled": True, "existingClaim": "shared"}},
    }
    objects = manifests(overlaid(MINIMAL, values))
    [text] = [one["data"]["executor.yaml"] for one in objects if "executor.yaml" in one.get("data", {})]
    spec = yaml.safe_load(text)["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["tolerations"][0]["key"], spec["nodeSelector"]) == ("data", {"disk": "fast"})
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}} in spec["volumes"]
    assert "/noetl-dagster-spark:9.9" in yaml.safe_dump(objects)


def test_only_what_makes_or_ends_pods_has_a_token() -> None:
    assert tokens(manifests(KIND)) == {"daemon", "webserver", "api", "run"}
    jobs = manifests(overlaid(MINIMAL, {"workers": {"containers": True}}))
    assert tokens(jobs) == {"daemon", "webserver", "api", "worker-default"}
    assert tokens(manifests(MINIMAL)) == {"daemon", "webserver", "api"}


def test_a_read_only_webserver_has_no_rights() -> None:
    objects = manifests(overlaid(KIND, {"dagster": {"webserver": {"readOnly": True}}}))
    assert tokens(objects) == {"daemon", "api", "run"}
    assert "webserver" not in rights(objects)
    assert "--read-only" in component(objects, "webserver").container["args"]


def test_only_what_launches_makes_jobs() -> None:
    def make(objects: list[Manifest], resource: str) -> set[str]:
        return {account for account, may in rights(objects).items() if (resource, "create") in may}

    assert make(manifests(KIND), "jobs") == {"daemon", "run"}
    assert make(manifests(KIND), "pods") == set()
    containers = manifests(overlaid(MINIMAL, {"workers": {"containers": True}}))
    assert make(containers, "jobs") == {"daemon", "worker"}
    assert make(manifests(MINIMAL), "jobs") == {"daemon"}
    spark = manifests(overlaid(MINIMAL, {"spark": {"mode": "kubernetes"}}))
    assert make(spark, "pods") == {"run", "worker"}


def test_the_pods_of_container_steps_are_restricted_and_placed_as_the_values_say() -> None:
    values: dict[str, Any] = {
        "runs": {"containers": True},
        "image": {"pullSecrets": [{"name": "registry"}]},
        "serviceAccounts": {"roles": {"container": {"name": "own"}}},
        "pod": {
            "labels": {"cost": "data"},
            "annotations": {"mesh": "off"},
            "tolerations": [{"key": "data"}],
            "initContainers": [{"name": "wait", "image": "busybox"}],
            "gracePeriodSeconds": 7,
        },
        "containers": {
            "deadlineSeconds": 60,
            "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}},
            "pod": {
                "nodeSelector": {"pool": "jobs"},
                "priorityClassName": "low",
                "securityContext": {"runAsUser": 7, "fsGroup": None, "fsGroupChangePolicy": None},
            },
        },
    }
    settings = of_kind(manifests(overlaid(MINIMAL, values)), "ConfigMap")["trial-noetl-dagster-settings"]["data"]
    assert settings["NOETL_CONTAINER_DEADLINE_SECONDS"] == "60"
    labels = {"name": "noetl-dagster", "instance": "trial", "component": "container"}
    assert json.loads(settings["NOETL_CONTAINER_POD"]) == {
        "metadata": {
            "labels": {"cost": "data", **{f"app.kubernetes.io/{name}": text for name, text in labels.items()}},
            "annotations": {"mesh": "off"},
        },
        "spec": {
            "serviceAccountName": "own",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"pool": "jobs"},
            "priorityClassName": "low",
            "tolerations": [{"key": "data"}],
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 7,
                "runAsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "resources": {"requests": {"cpu": "1", "memory": "128Mi"}, "limits": {"memory": "2Gi"}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }


def test_without_the_right_to_create_jobs_there_is_nothing_of_container_steps() -> None:
    objects = manifests(MINIMAL)
    assert not [one for one in objects if one["metadata"]["name"].endswith("-container")]
    assert "NOETL_CONTAINER_POD" not in of_kind(objects, "ConfigMap")["trial-noetl-dagster-settings"]["data"]


def test_a_token_is_good_for_something(objects: list[Manifest]) -> None:
    """Who has a token has rights, and the other way round."""
    bound = {subject["name"] for one in of_kind(objects, "RoleBinding").values() for subject in one["subjects"]}
    with_token = {
        pods.spec["serviceAccountName"] for pods in all_pods(objects) if pods.spec["automountServiceAccountToken"]
    }
    assert not bound or bound == with_token


def test_no_right_is_a_star_and_none_is_of_the_cluster(objects: list[Manifest]) -> None:
    assert not of_kind(objects, "ClusterRole")
    assert all(resource != "*" and verb != "*" for may in rights(objects).values() for resource, verb in may)
    assert not any(
        resource == "secrets" and verb not in ("get", "create")
        for may in rights(objects).values()
        for resource, verb in may
    )


def test_what_dagster_s_launcher_asks_is_allowed() -> None:
    """The requests of dagster-k8s, by the methods of its client."""
    asked = {
        ("jobs", "create"),
        ("jobs", "list"),
        ("jobs", "delete"),
        ("jobs/status", "get"),
        ("pods", "get"),
        ("pods", "list"),
        ("pods", "delete"),
        ("pods/log", "get"),
        ("events", "list"),
    }
    found = rights(manifests(KIND))
    assert asked <= found["daemon"]
    assert asked <= found["run"]
    assert asked - {("jobs", "create")} <= found["webserver"]
    assert asked - {("jobs", "create")} <= found["api"]


def test_playbooks_read_only_the_secrets_that_are_named() -> None:
    objects = manifests(overlaid(MINIMAL, {"rbac": {"readSecrets": ["one"]}}))
    role = of_kind(objects, "Role")["trial-noetl-dagster-secrets"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["one"], "verbs": ["get"]}]
    subjects = of_kind(objects, "RoleBinding")["trial-noetl-dagster-secrets"]["subjects"]
    assert {one["name"] for one in subjects} == {"trial-noetl-dagster-run", "trial-noetl-dagster-worker"}


def test_each_pod_has_the_secrets_that_it_needs_and_no_other() -> None:
    objects = manifests(KIND)
    wanted = {
        "daemon": {"NOETL_DAGSTER_DB_URL", "NOETL_MINIO_ACCESS_KEY", "NOETL_MINIO_SECRET_KEY"},
        "ingest": {"NOETL_DB_URL", "NOETL_NATS_URL", "NOETL_MINIO_ACCESS_KEY", "NOETL_MINIO_SECRET_KEY"},
    }
    for name, secrets in wanted.items():
        env = component(objects, name).container["env"]
        assert {one["name"] for one in env if "valueFrom" in one} == secrets
    tokens_of_all = [
        pods.component for pods in pods_of(objects) if "NOETL_SERVICE_TOKENS" in str(pods.container["env"])
    ]
    assert tokens_of_all == ["api"]


def test_the_trial_s_secret_outlives_the_release() -> None:
    (secret,) = of_kind(manifests(KIND), "Secret").values()
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_every_kind_of_service_account_annotation_arrives() -> None:
    accounts = of_kind(manifests(SCENARIOS["everything"]), "ServiceAccount")
    google = {"iam.gke.io/gcp-service-account": "noetl@my-project.iam.gserviceaccount.com"}
    assert accounts["trial-noetl-dagster-worker"]["metadata"]["annotations"] == google
    assert accounts["trial-noetl-dagster-api"]["metadata"]["annotations"] == {**google, "own": "api"}
    assert "trial-noetl-dagster-run" not in accounts
    hook = accounts["trial-noetl-dagster-provision"]["metadata"]["annotations"]
    assert hook["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert google.items() <= hook.items()
