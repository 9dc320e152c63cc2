"""The fields of a container: unknown keys and wrong types are refused where they stand; templates pass."""

from __future__ import annotations

import sys
from textwrap import indent

import pytest

from noetl_dagster.errors import ProblemKind
from tests.playbook.playbooks import errors_of, load, problems_of


def running(fields: str) -> str:
    """A step with a container, whose fields begin on line 8, column 7."""
    return f"- step: start\n  tool:\n    kind: container\n{indent(fields, '    ')}\n"


EVERYTHING = """\
image: ghcr.io/me/job:1
command: [echo, 1, true]
args: [--fast, 2]
env: [{name: TZ, value: UTC}, {name: KEY, valueFrom: {secretKeyRef: {name: keys, key: key}}}]
env_from: [{secretRef: {name: keys}}, {configMapRef: {name: plain, optional: true}, prefix: P_}]
namespace: jobs
service_account: etl
resources:
  requests: {cpu: 0, memory: 2Gi}
  limits: {cpu: 500m, memory: 4Gi, ephemeral-storage: 20Gi, nvidia.com/gpu: 1, hugepages-2Mi: 128Mi}
volumes:
- {name: scratch, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
- {name: keys, secret: {secretName: keys, defaultMode: 0400}}
- {name: data, persistentVolumeClaim: {claimName: data}}
volume_mounts:
- {name: scratch, mountPath: /scratch}
- {name: keys, mountPath: /keys, readOnly: true}
working_dir: /scratch
node_selector: {pool: gpu, spot: "true"}
tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}, {operator: Exists, tolerationSeconds: 60}]
image_pull_policy: IfNotPresent
image_pull_secrets: [registry, {name: other}]
security_context:
  runAsUser: 1000
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
labels: {team: data, cost: 7}
annotations: {example.org/why: training a model}
"""


def test_everything_that_a_container_may_say() -> None:
    assert problems_of(running(EVERYTHING)) == []
    [task] = load(running(EVERYTHING)).steps[0].tasks
    assert task.config["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        "image: '{{ image }}'\nenv: '{{ env }}'\ncommand: '{{ command }}'\nresources: '{{ resources }}'",
        "image: i\nresources: {requests: {cpu: 2, memory: '{{ memory }}'}, limits: '{{ limits }}'}",
        "image: i\nresources: {requests: {cpu: '{{ cpu }}'}, limits: {cpu: 1}}",
        "image: i\nenv: {TZ: '{{ zone }}', '{{ name }}': UTC}",
        "image: i\nenv: ['{{ first }}', {name: '{{ name }}', value: '{{ value }}'}]",
        "image: i\nvolumes: '{{ volumes }}'\nvolume_mounts: [{name: in, mountPath: /in}]",
        "image: i\nvolumes: [{name: '{{ n }}', emptyDir: {}}]\nvolume_mounts: [{name: in, mountPath: /in}]",
        "image: i\nvolumes: ['{{ volume }}']\nvolume_mounts: [{name: in, mountPath: /in}]",
        "image: i\ntolerations: [{operator: '{{ operator }}'}]\nsecurity_context: {privileged: '{{ yes }}'}",
        "image: i\nimage_pull_policy: '{{ policy }}'\nimage_pull_secrets: ['{{ secret }}']",
        "image: i\nenv:\nresources:\nvolumes:",
    ],
)
def test_templates_and_nothing_are_left_to_the_cluster(fields: str) -> None:
    assert errors_of(running(fields)) == []


@pytest.mark.parametrize(
    ("field", "at", "said"),
    [
        ("image: [a]", "[a", "image must be text, found a list"),
        ("command: {run: a}", "{run", "command must be text, found a mapping"),
        ("command: [sh, [a]]", "[a", "command 2 must be text, found a list"),
        ("args: [{a: 1}]", "{a", "args 1 must be text, found a mapping"),
        ("env: [TZ=UTC]", "TZ=UTC", "env 1 must be a mapping (key: value), found the text 'TZ=UTC'"),
        ("env: [{nam: TZ}]", "nam", "env 1: unknown key 'nam'; did you mean 'name'?"),
        ("env: [{name: K, valueFrom: {secretRef: {}}}]", "secretRef", "did you mean 'secretKeyRef'?"),
        ("env: {A: [1]}", "[1", "env, A must be text, found a list"),
        ("env: 5", "5", "env must be a mapping (key: value), found 5"),
        ("env_from: {secrets: [keys]}", "{secrets", "env_from must be a list, found a mapping"),
        ("resources: {limit: {cpu: 1}}", "limit", "resources: unknown key 'limit'; did you mean 'limits'?"),
        ("resources: {limits: {cpu: [1]}}", "[1", "resources, limits, cpu must be text, found a list"),
        ("volumes: [{name: a, secret: {name: b, secretName: b}}]", "name: b", "unknown key 'name'"),
        ("volumes: [{name: a, emptyDirr: {}}]", "emptyDirr", "did you mean 'emptyDir'?"),
        (
            "volumes: [{name: a, csi: {drivr: b}}]",
            "drivr",
            "volumes 1, csi: unknown key 'drivr'; did you mean 'driver'?",
        ),
        ("volumeMounts: {name: a}", "{name", "volumeMounts must be a list, found a mapping"),
        ("volume_mounts: [{mount_path: /a}]", "mount_path", "Kubernetes writes 'mountPath'"),
        ("security_context: {run_as_user: 1}", "run_as_user", "Kubernetes writes 'runAsUser'"),
        ("security_context: {runAsUser: root}", "root", "runAsUser must be a whole number, found the text 'root'"),
        ("security_context: {privileged: 1}", "1", "privileged must be true or false, found 1"),
        ("security_context: {capabilities: {drop: ALL}}", "ALL", "drop must be a list, found the text 'ALL'"),
        ("tolerations: [{tolerationSecond: 1}]", "tolerationSecond", "did you mean 'tolerationSeconds'?"),
        ("labels: {team: [a]}", "[a", "labels, team must be text, found a list"),
    ],
)
def test_keys_and_types_are_those_of_the_client(field: str, at: str, said: str) -> None:
    """``at``: what stands at the place of the error."""
    [error] = errors_of(running(field if field.startswith("image:") else f"{field}\nimage: i"))
    assert said in error
    assert error.startswith(f"sample.yaml:8:{7 + field.index(at)}: step 'start'")


def test_without_the_client_only_the_fields_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    assert errors_of(running("image: i\nvolumes: [{nam: a}]")) == []
    [error] = errors_of(running("image: i\nvolumes: {name: a}"))
    assert "volumes must be a list" in error


def test_a_container_without_an_image_is_refused() -> None:
    [problem] = problems_of(running("command: echo"))
    assert (problem.message, problem.kind) == ("step 'start': container needs 'image'", ProblemKind.MISSING_FIELD)


def test_what_is_wrong_below_runtime_is_reported_there() -> None:
    steps = running("runtime:\n  image: i\n  env: {A: [1]}\nenv: {B: b, C: [2]}")
    assert errors_of(steps) == [
        "sample.yaml:10:18: step 'start': env, A must be text, found a list",
        "sample.yaml:11:22: step 'start': env, C must be text, found a list",
    ]
