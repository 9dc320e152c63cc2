"""What playbooks ask of pods: in Kubernetes' words, the step before the run."""

from __future__ import annotations

import pytest

from noetl_dagster.playbook.pods import Amount, Pod
from noetl_dagster.playbook.schema import language_schema
from tests.playbook.playbooks import errors_of, load, step_of, warnings_of

TOOL = "  tool: {kind: noop}\n"


def asking(kubernetes: str) -> str:
    return f"- step: start\n{TOOL}  spec: {{kubernetes: {kubernetes}}}\n"


def pod_of(kubernetes: str, *, root: str = "") -> Pod:
    pod = step_of(asking(kubernetes), root=root).spec.pod
    assert pod is not None
    return pod


def test_everything_that_a_step_may_ask_for() -> None:
    pod = pod_of(
        "{image: 'ghcr.io/me/gpu:1', image_pull_policy: Always, cpu: 500m, memory: {request: 2Gi, limit: 4Gi},"
        " ephemeral_storage: 20Gi, gpu: 1, node_selector: {pool: gpu, spot: true}, service_account: etl,"
        " tolerations: [{key: gpu, value: true, effect: NoSchedule, tolerationSeconds: 60}],"
        " env: {TZ: UTC, N: 4, DEBUG: true}, env_from: {secrets: [keys], config_maps: [plain]},"
        " labels: {team: data}, annotations: {'example.org/why': training a model}, priority_class: high}"
    )
    assert pod == Pod(
        image="ghcr.io/me/gpu:1",
        image_pull_policy="Always",
        cpu=Amount(request="500m", limit="500m"),
        memory=Amount(request="2Gi", limit="4Gi"),
        ephemeral_storage=Amount(request="20Gi", limit="20Gi"),
        gpu={"nvidia.com/gpu": 1},
        node_selector={"pool": "gpu", "spot": "true"},
        tolerations=({"key": "gpu", "value": "true", "effect": "NoSchedule", "tolerationSeconds": 60},),
        service_account="etl",
        env={"TZ": "UTC", "N": "4", "DEBUG": "true"},
        env_secrets=("keys",),
        env_config_maps=("plain",),
        labels={"team": "data"},
        annotations={"example.org/why": "training a model"},
        priority_class="high",
    )


def test_kubernetes_own_spelling_means_the_same() -> None:
    ours = pod_of(
        "{node_selector: {a: b}, service_account: etl, priority_class: high, ephemeral_storage: 1Gi,"
        " image_pull_policy: Never, env_from: {secrets: [keys], config_maps: [plain]}}"
    )
    theirs = pod_of(
        "{nodeSelector: {a: b}, serviceAccountName: etl, priorityClassName: high, ephemeral-storage: 1Gi,"
        " imagePullPolicy: Never,"
        " envFrom: [{secretRef: {name: keys}}, {configMapRef: {name: plain}}]}"
    )
    assert theirs == ours


def test_a_step_asks_by_itself_and_is_like_the_run_where_it_says_nothing() -> None:
    root = """
    executor:
      spec:
        kubernetes: {memory: 8Gi, cpu: 2, service_account: etl, env: {A: run, B: run}, gpu: {amd.com/gpu: 1}}
    """
    playbook = load(
        asking("{memory: 1Gi, env: {B: step}, gpu: 2}") + f"- step: plain\n{TOOL}" + f"- step: same\n{TOOL}"
        "  spec: {kubernetes: true}\n",
        root=root,
    )
    assert playbook.pod is not None
    assert playbook.pod.memory == Amount(request="8Gi", limit="8Gi")
    assert playbook.step("plain").spec.pod is None
    assert playbook.step("same").spec.pod == playbook.pod
    assert playbook.step("start").spec.pod == Pod(
        memory=Amount(request="1Gi", limit="1Gi"),
        cpu=Amount(request="2", limit="2"),
        service_account="etl",
        env={"A": "run", "B": "step"},
        gpu={"nvidia.com/gpu": 2},
    )
    assert not playbook.step("start").tasks[0].spec.options  # tools are not told


@pytest.mark.parametrize(
    ("kubernetes", "said"),
    [
        ("{cpu: [1]}", "cpu must be text, found a list"),
        ("{cpu: {request: 1, most: 2}}", "unknown key 'most'"),
        ("{gpu: 0.5}", "gpu.nvidia.com/gpu: input should be a valid integer"),
        ("{gpu: {amd.com/gpu: -1}}", "gpu.amd.com/gpu: input should be greater than or equal to 0, found -1"),
        ("{memori: 4Gi}", "unknown key 'memori'; did you mean 'memory'?"),
        ("{image: '{{ image }}'}", "image is no template: pods are described when the playbook is loaded"),
        ("{memory: '{{ memory }}'}", "memory is no template"),
        ("{env: {A: '{{ a }}'}}", "A is no template"),
        ("{labels: {team: [a]}}", "labels, team must be text, found a list"),
        ("{env_from: {secretz: [keys]}}", "unknown key 'secretz'; did you mean 'secrets'?"),
        ("{tolerations: [a]}", "tolerations 1 must be a mapping (key: value), found the text 'a'"),
        ("{tolerations: [{key: a, toleration_seconds: 60}]}", "Kubernetes writes 'tolerationSeconds'"),
        ("[gpu]", "expected a mapping (key: value), found a list"),
        ("{serviceAccount: a, service_account: b}", "mean the same; keep"),
    ],
)
def test_what_cannot_be_read_is_refused_here(kubernetes: str, said: str) -> None:
    [error] = errors_of(asking(kubernetes))
    assert said in error
    assert error.startswith("sample.yaml:7:")
    assert "step 'start'" in error


def test_the_run_is_checked_too() -> None:
    root = "executor:\n  spec:\n    kubernetes: {memory: [lots]}\n"
    [error] = errors_of(f"- step: start\n{TOOL}", root=root)
    assert "executor, spec, kubernetes: memory must be text" in error


def test_a_cycle_has_one_pod() -> None:
    cycle = """
    - step: start
      tool: {kind: noop}
      spec: {kubernetes: {memory: 1Gi}}
      next: [{step: again, when: "{{ ctx.more }}"}]
    - step: again
      tool: {kind: noop}
      spec: {kubernetes: {memory: MEMORY}}
      next: [start]
    """
    [error] = errors_of(cycle.replace("MEMORY", "2Gi"))
    assert "step 'again': its pod is another than that of step 'start'; the cycle start -> again -> start" in error
    assert errors_of(cycle.replace("MEMORY", "1Gi")) == []


def test_pods_that_would_do_nothing_are_pointed_out() -> None:
    [warning] = warnings_of(f"- step: start\n{TOOL}  spec: {{dispatch: workers, kubernetes: {{gpu: 1}}}}\n")
    assert "workers of the pool run it, and its pod would only wait" in warning


def test_editors_know_every_field() -> None:
    pod = language_schema()["$defs"]["spec"]["properties"]["kubernetes"]["anyOf"][0]["properties"]
    fields = set(Pod.model_fields) - {"env_secrets", "env_config_maps"}
    assert fields | {"nodeSelector", "envFrom", "serviceAccountName"} <= set(pod)
    assert all(field["description"] for field in pod.values())
