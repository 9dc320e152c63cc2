"""What a platform team says of every pod, of Services and of Ingresses reaches all of them."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import orjson
import pytest
import yaml
from cryptography.fernet import Fernet

from tests.helm.chart import (
    KIND,
    MINIMAL,
    SCENARIOS,
    Manifest,
    Pods,
    chart,
    manifests,
    of_kind,
    overlaid,
    pods_of,
)
from tests.helm.chart import component as pods_named
from tests.helm.launched import run_job, run_pods

FUSE = "gke-gcsfuse/volumes"


def executors(objects: list[Manifest]) -> Manifest:
    """The pod that Spark starts its executors from."""
    (text,) = (one["data"]["executor.yaml"] for one in objects if "executor.yaml" in one.get("data", {}))
    pod: Manifest = yaml.safe_load(text)
    return pod


def templates(objects: list[Manifest]) -> dict[str, Manifest]:
    """Every pod by its component, those that Dagster and Spark start included."""
    found = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one
        for one in [
            *(one for one in objects if one["kind"] == "Pod"),
            *(one["spec"]["template"] for one in objects if one["kind"] in ("Deployment", "StatefulSet", "Job")),
            run_job(objects)["spec"]["template"],
            executors(objects),
        ]
    }
    assert {"provision", "test", "run", "executor", "webserver", "worker-default"} <= found.keys()
    return found


def test_every_pod_has_what_values_say_of_pods() -> None:
    values = overlaid(
        SCENARIOS["everything"], {"pod": {"annotations": {"own": "yes"}}, "postgresql": {"enabled": True}}
    )
    objects = manifests(values)
    stated = values["pod"]
    for component, pod in templates(objects).items():
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        (container,) = spec["containers"]
        asked = {**stated["labels"], **values["commonLabels"]}
        assert labels.items() >= asked.items(), component
        assert pod["metadata"]["annotations"]["own"] == "yes", component
        for field in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            assert spec[field] == stated[field], (component, field)
        assert spec["imagePullSecrets"] == values["image"]["pullSecrets"], component
        assert stated["extraEnv"][0] in container["env"], component
        assert stated["extraEnvFrom"][0] in container["envFrom"], component
        assert stated["extraVolumes"][0] in spec["volumes"], component
        assert stated["extraVolumeMounts"][0] in container["volumeMounts"], component


def test_the_jobs_of_runs_have_the_labels_of_every_object() -> None:
    job = run_job(manifests(overlaid(KIND, {"commonLabels": {"team": "data"}})))
    assert job["metadata"]["labels"]["team"] == "data"


def test_gcsfuse_is_asked_for_where_the_volume_is_mounted() -> None:
    objects = manifests(SCENARIOS["gke"])
    asking = set()
    for component, pod in templates(objects).items():
        mounted = any(volume["name"] == "shared" for volume in pod["spec"]["volumes"])
        assert (pod["metadata"].get("annotations", {}).get(FUSE) == "true") == mounted, component
        if mounted:
            asking.add(component)
    assert {"run", "executor", "api", "worker-large", "code-location"} <= asking
    others = templates(manifests(SCENARIOS["eks"]))
    assert not [name for name, pod in others.items() if FUSE in pod["metadata"].get("annotations", {})]


def test_a_step_s_own_annotations_leave_the_volume_s() -> None:
    asked: dict[str, Any] = {"pod_template_spec_metadata": {"annotations": {"own": "yes"}}}
    values = overlaid(
        SCENARIOS["gke"], {"runs": {"allowedFields": {"pod_template_spec_metadata": {"annotations": True}}}}
    )
    template = run_job(manifests(values), asked)["spec"]["template"]
    assert template["metadata"]["annotations"].items() >= {FUSE: "true", "own": "yes"}.items()


def test_services_have_their_type_annotations_and_labels() -> None:
    own = {"type": "LoadBalancer", "annotations": {"load-balancer": "internal"}, "labels": {"edge": "yes"}}
    values = overlaid(KIND, {"api": {"service": own}, "dagster": {"webserver": {"service": own}}})
    services = of_kind(manifests(values), "Service")
    for name, service in services.items():
        asked = name.endswith(("-api", "-webserver"))
        assert (service["spec"].get("type") == "LoadBalancer") == asked, name
        assert (service["metadata"].get("annotations") == own["annotations"]) == asked, name
        assert (service["metadata"]["labels"].get("edge") == "yes") == asked, name


def test_each_ingress_has_annotations_of_its_own() -> None:
    ingress = {
        "enabled": True,
        "annotations": {"both": "yes", "timeout": "60"},
        "webserver": {"host": "dagster.example.com", "annotations": {"login": "oauth"}},
        "api": {"host": "api.example.com", "annotations": {"timeout": "300"}},
    }
    found = of_kind(manifests(overlaid(KIND, {"ingress": ingress})), "Ingress")
    stated = {name.rpartition("-")[2]: one["metadata"]["annotations"] for name, one in found.items()}
    assert stated == {
        "webserver": {"both": "yes", "timeout": "60", "login": "oauth"},
        "api": {"both": "yes", "timeout": "300"},
    }


def test_names_of_values_take_the_place_of_the_release_s() -> None:
    named = manifests(overlaid(KIND, {"nameOverride": "flows"}))
    assert all(one["metadata"]["name"].startswith("trial-flows") for one in named)
    assert {one["metadata"]["labels"]["app.kubernetes.io/name"] for one in named} == {"flows"}
    whole = manifests(overlaid(KIND, {"fullnameOverride": "flows"}))
    assert all(one["metadata"]["name"].startswith("flows-") for one in whole)
    pods: list[Pods] = [*pods_of(whole), run_pods(whole)]
    assert not [pod.name for pod in pods if "trial-noetl-dagster" in str(pod.spec)]


def test_tls_is_of_the_ingress_whose_host_it_names() -> None:
    ingress = {
        "enabled": True,
        "webserver": {"host": "dagster.example.com"},
        "api": {"host": "api.example.com"},
        "tls": [
            {"secretName": "ui", "hosts": ["dagster.example.com"]},
            {"secretName": "api", "hosts": ["api.example.com"]},
            {"secretName": "both", "hosts": ["api.example.com", "dagster.example.com"]},
            {"secretName": "any"},
        ],
    }
    found = of_kind(manifests(overlaid(KIND, {"ingress": ingress})), "Ingress")
    secrets = {name: [one["secretName"] for one in about["spec"]["tls"]] for name, about in found.items()}
    assert secrets == {
        "trial-noetl-dagster-webserver": ["ui", "both", "any"],
        "trial-noetl-dagster-api": ["api", "both", "any"],
    }


def test_long_names_that_begin_alike_stay_apart() -> None:
    long = "a-team-with-a-long-name-and-a-longer-project"
    names = {release: of_kind(manifests(KIND, release=release), "Service") for release in (long, f"{long}-2")}
    assert not names[long].keys() & names[f"{long}-2"].keys()
    assert all(name.startswith(long[:33]) for found in names.values() for name in found)
    overridden = [{"nameOverride": f"{long}-{number}"} for number in (1, 2)]
    labels = {
        one["metadata"]["labels"]["app.kubernetes.io/name"]
        for values in overridden
        for one in manifests(overlaid(KIND, values))
    }
    assert len(labels) == 2


USERS = ("runAsUser", "runAsGroup", "fsGroup")


def test_users_are_those_of_values_or_the_cluster_s() -> None:
    """OpenShift gives each namespace users of its own, and refuses pods that name others."""
    base = overlaid(SCENARIOS["everything"], {"postgresql": {"enabled": True}})
    nobody = {"pod": {"securityContext": dict.fromkeys((*USERS, "fsGroupChangePolicy"))}}
    for component, pod in templates(manifests(overlaid(base, nobody))).items():
        context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["spec"]["securityContext"] == context, component
    stated = {
        "pod": {"securityContext": {"runAsUser": 1000, "fsGroup": None, "supplementalGroups": [7]}},
        "runs": {"pod": {"securityContext": {"runAsUser": 2000}}},
        "spark": {"executors": {"pod": {"securityContext": {"runAsUser": None}}}},
    }
    for component, pod in templates(manifests(overlaid(base, stated))).items():
        context = pod["spec"]["securityContext"]
        users = {"run": 2000, "postgresql": 999, "executor": None}
        assert context.get("runAsUser") == users.get(component, 1000), component
        assert context["runAsGroup"] == (999 if component == "postgresql" else 10001), component
        assert "fsGroup" not in context
        assert context["supplementalGroups"] == [7]
        assert context["runAsNonRoot"] is True


def test_executors_go_where_their_own_values_say() -> None:
    own = {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "spark", "operator": "Exists"}],
        "labels": {"cost": "spark"},
        "extraEnv": [{"name": "OWN", "value": "1"}],
    }
    values = {"pod": {"nodeSelector": {"pool": "data"}}, "spark": {"mode": "kubernetes"}}
    pod = executors(manifests(overlaid(KIND, values, {"spark": {"executors": {"pod": own}}})))
    assert pod["spec"]["nodeSelector"] == {"pool": "data", "disk": "fast"}
    assert pod["spec"]["tolerations"] == own["tolerations"]
    assert pod["metadata"]["labels"]["cost"] == "spark"
    assert own["extraEnv"][0] in pod["spec"]["containers"][0]["env"]


DIGEST = f"sha256:{'2' * 64}"


@pytest.mark.parametrize(
    ("image", "executors", "expected"),
    [
        ({}, {}, "ghcr.io/noetl/noetl-dagster-spark:0.1.0"),
        ({"repository": "own.io/flows", "tag": "7"}, {"repository": "own.io/s", "tag": "8"}, "own.io/s:8"),
        ({"tag": "7"}, {"digest": DIGEST}, f"ghcr.io/noetl/noetl-dagster-spark@{DIGEST}"),
    ],
)
def test_executors_have_the_image_that_belongs_to_the_platform_s(
    image: dict[str, str], executors: dict[str, str], expected: str
) -> None:
    values = {"image": image, "spark": {"mode": "kubernetes", "executors": {"image": executors}}}
    run = run_pods(manifests(overlaid(KIND, values)))
    [config] = [one["value"] for one in run.container["env"] if one["name"] == "NOETL_SPARK_CONFIG"]
    assert orjson.loads(config)["spark.kubernetes.container.image"] == expected


def test_another_code_location_has_an_image_and_a_module_of_its_own() -> None:
    objects = manifests(SCENARIOS["gateway"])
    reports = pods_named(objects, "code-location-reports")
    assert reports.container["image"] == "registry.example.org/reports:0.1.0"
    assert reports.variables(objects)["DAGSTER_CURRENT_IMAGE"] == reports.container["image"], "its runs have it too"
    assert reports.container["args"][-2:] == ["-m", "reports.definitions"]
    workspace = yaml.safe_load(of_kind(objects, "ConfigMap")["trial-noetl-dagster-workspace"]["data"]["workspace.yaml"])
    servers = {one["grpc_server"]["location_name"]: one["grpc_server"]["host"] for one in workspace["load_from"]}
    assert servers == {
        "noetl_dagster": "trial-noetl-dagster-code-location",
        "reports": "trial-noetl-dagster-code-location-reports",
    }
    assert set(servers.values()) <= of_kind(objects, "Service").keys()


def test_routes_of_the_gateway_api_and_of_openshift_lead_to_services() -> None:
    gateway = of_kind(manifests(SCENARIOS["gateway"]), "HTTPRoute")["trial-noetl-dagster-api"]["spec"]
    assert gateway["parentRefs"] == [{"name": "gateway", "namespace": "edge"}]
    assert gateway["rules"][0]["backendRefs"] == [{"name": "trial-noetl-dagster-api", "port": 8700}]
    routes = of_kind(manifests(SCENARIOS["OpenShift"]), "Route")
    assert {name.rpartition("-")[2]: one["spec"]["tls"]["termination"] for name, one in routes.items()} == {
        "webserver": "edge",
        "api": "reencrypt",  # which has TLS of its own
    }
    assert routes["trial-noetl-dagster-api"]["spec"]["port"] == {"targetPort": "api"}


def test_links_lead_to_the_hosts_that_are_published() -> None:
    settings = of_kind(manifests(SCENARIOS["gateway"]), "ConfigMap")["trial-noetl-dagster-settings"]["data"]
    assert settings["NOETL_DAGSTER_URL"] == "https://dagster.example.com"
    assert settings["NOETL_PAGES_URL"] == "https://api.example.com"


def test_a_service_says_who_makes_its_load_balancer_and_for_whom() -> None:
    stated = {
        "type": "LoadBalancer",
        "loadBalancerClass": "service.k8s.aws/nlb",
        "loadBalancerSourceRanges": ["192.0.2.0/24"],
        "ipFamilyPolicy": "PreferDualStack",
        "ipFamilies": ["IPv6", "IPv4"],
    }
    objects = manifests(overlaid(KIND, {"api": {"service": stated}}))
    assert of_kind(objects, "Service")["trial-noetl-dagster-api"]["spec"].items() >= stated.items()


def test_processes_listen_on_the_addresses_of_pods() -> None:
    six, four = (manifests(overlaid(KIND, {"ipFamily": family})) for family in ("IPv6", "IPv4"))
    for objects, webserver, code, health in ((six, "::", "[::]", "::"), (four, "0.0.0.0", "0.0.0.0", "0.0.0.0")):
        assert pods_named(objects, "webserver").container["args"][2] == webserver
        assert pods_named(objects, "code-location").container["args"][4] == code
        assert pods_named(objects, "api").variables(objects)["NOETL_SERVICE_HOST"] == health
        assert pods_named(objects, "ingest").variables(objects)["NOETL_HEALTH_HOST"] == health


def test_upkeep_does_what_dagster_s_schedules_do() -> None:
    jobs = of_kind(manifests(SCENARIOS["trial with Spark"]), "CronJob")
    commands = {
        name.rpartition("-")[2]: one["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"]
        for name, one in jobs.items()
    }
    assert commands == {"reaper": ["noetl-dagster", "reap"], "maintenance": ["noetl-dagster", "maintain"]}
    assert all(one["spec"]["concurrencyPolicy"] == "Forbid" for one in jobs.values())


def test_what_a_team_adds_to_pods_and_workloads_arrives() -> None:
    proxy = {"name": "proxy", "image": "proxy:1"}
    wait = {"name": "wait", "image": "busybox:1"}
    pod = {
        "initContainers": [wait],
        "extraContainers": [proxy],
        "runtimeClassName": "gvisor",
        "schedulerName": "own",
        "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
        "hostAliases": [{"ip": "10.0.0.5", "hostnames": ["db"]}],
        "workloadAnnotations": {"reloader.stakater.com/auto": "true"},
        "ephemeralStorage": "5Gi",
    }
    own = {"gracePeriodSeconds": 300, "strategy": {"type": "Recreate"}, "probes": {"liveness": {"periodSeconds": 60}}}
    objects = manifests(
        overlaid(KIND, {"pod": pod, "api": {"pod": own}, "ingest": {"pod": {"probes": {"startup": None}}}})
    )
    for pods in [*pods_of(objects), run_pods(objects)]:
        spec = pods.spec
        assert spec["initContainers"][0].items() >= wait.items(), pods.name
        assert spec["runtimeClassName"] == "gvisor", pods.name
        assert spec["schedulerName"] == "own"
        assert spec["dnsConfig"]["options"]
        assert spec["hostAliases"]
        main, *beside = spec["containers"]
        assert (beside == [proxy]) == (pods.kind in ("Deployment", "StatefulSet")), pods.name
        assert main["resources"]["limits"]["ephemeral-storage"] == "5Gi"
    for one in of_kind(objects, "Deployment").values():
        assert one["metadata"]["annotations"] == {"reloader.stakater.com/auto": "true"}
    api = of_kind(objects, "Deployment")["trial-noetl-dagster-api"]["spec"]
    assert api["strategy"] == {"type": "Recreate"}
    assert api["template"]["spec"]["terminationGracePeriodSeconds"] == 300
    probe = api["template"]["spec"]["containers"][0]["livenessProbe"]
    assert (probe["periodSeconds"], probe["httpGet"]["path"]) == (60, "/health")
    ingest = of_kind(objects, "Deployment")["trial-noetl-dagster-ingest"]["spec"]["template"]["spec"]["containers"][0]
    assert "startupProbe" not in ingest
    assert "livenessProbe" in ingest


def test_further_manifests_are_rendered_with_the_release() -> None:
    added = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-own"}, "data": {"a": "b"}},
        'apiVersion: v1\nkind: Secret\nmetadata:\n  name: {{ include "noetl.fullname" . }}-own\n',
    ]
    objects = manifests(overlaid(MINIMAL, {"extraManifests": added}))
    assert of_kind(objects, "ConfigMap")["trial-own"]["data"] == {"a": "b"}
    assert "trial-noetl-dagster-own" in of_kind(objects, "Secret")


def test_a_trial_s_secrets_stay_the_same_where_nobody_can_look_them_up() -> None:
    """``helm template`` and Argo CD render without a cluster."""

    def made(password: str) -> dict[str, str]:
        chart.cache_clear()
        values = overlaid(KIND, {"trial": {"password": password}, "commonLabels": {"at": str(next(counter))}})
        data: dict[str, str] = of_kind(manifests(values), "Secret")["trial-noetl-dagster-trial"]["data"]
        return data

    counter = itertools.count()
    assert made("one") == made("one")
    assert not made("one").items() & made("two").items() - {("NOETL_MINIO_ACCESS_KEY", "bm9ldGw=")}
    assert made("")["NOETL_SERVER_TOKEN"] != made("")["NOETL_SERVER_TOKEN"]
    for password in ("", "one"):
        Fernet(base64.b64decode(made(password)["NOETL_CREDENTIAL_KEY"]))
