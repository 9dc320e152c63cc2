"""What a container's task says of its job: what a cluster refuses is refused where it stands; templates pass."""

from __future__ import annotations

from textwrap import indent

import kubernetes.client
import pytest

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects import container
from noetl_dagster.playbook.dialects import kubernetes as shapes
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
        ("image: ''", "''", "image is empty"),
        ("command: 5", "5", "command must be text, which a shell runs, or a list of words, found 5"),
        ("command: {run: a}", "{run", "or a list of words, found a mapping"),
        ("command: [sh, [a]]", "[a", "command 2: must be text, found a list"),
        ("args: [{a: 1}]", "{a", "args 1: must be text, found a mapping"),
        ("env: [TZ=UTC]", "TZ=UTC", "env 1: write {name: TZ, value: UTC}, found the text 'TZ=UTC'"),
        ("env: [{nam: TZ}]", "nam", "env 1: unknown key 'nam'; did you mean 'name'?"),
        ("env: [{name: N, value: 4}]", "4", "env 1: value must be text, found 4; write it in quotes"),
        ("env: [{value: a}]", "{value", "env 1: 'name' is missing"),
        ("env: [{name: 'a b'}]", "'a b'", "env: 'a b' cannot be the name of an environment variable"),
        (
            "env: [{name: K, valueFrom: {secretKeyRef: {name: keys}}}]",
            "{name: k",
            "secretKeyRef: 'key' is missing",
        ),
        ("env: [{name: K, valueFrom: {secretRef: {}}}]", "secretRef", "did you mean 'secretKeyRef'?"),
        ("env: {A: [1]}", "[1", "env: 'A' must be text, found a list"),
        ("env: 5", "5", "env: expected a mapping (key: value), found 5"),
        ("env_from: {secrets: [keys]}", "{secrets", "env_from must be a list of {secretRef: {name: keys}}"),
        ("env_from: [{secretReff: {name: a}}]", "secretReff", "did you mean 'secretRef'?"),
        ("namespace: My Jobs", "My", "namespace 'My Jobs' is no name of Kubernetes"),
        ("serviceAccountName: My_Account", "My_Account", "serviceAccountName 'My_Account' is no name"),
        ("resources: {limit: {cpu: 1}}", "limit", "resources: unknown key 'limit'; did you mean 'limits'?"),
        (
            "resources: {limits: {memory: lots}}",
            "lots",
            "memory is no quantity: the text 'lots'; write 512Mi or",
        ),
        ("resources: {limits: {memory: 512m}}", "512m", "memory 512m is 0.512 bytes; write a unit"),
        ("resources: {limits: {memori: 4Gi}}", "memori", "'memori' is no resource; did you mean 'memory'?"),
        (
            "resources: {limits: {nvidia.com/gpu: 0.5}}",
            "0.5",
            "'nvidia.com/gpu' is 0.5; write a whole number",
        ),
        (
            "resources: {requests: {cpu: 4}, limits: {cpu: 2}}",
            "4",
            "cpu: request 4 is more than limit 2; raise the limit",
        ),
        ("resources: [cpu]", "[cpu", "resources: expected a mapping (key: value), found a list"),
        (
            "volumes: {name: a}",
            "{name",
            "volumes must be a list of {name: scratch, emptyDir: {}}, found a mapping",
        ),
        ("volumes: [{name: a}]", "{name", "volumes 1: it says nothing of what it is, such as emptyDir: {}"),
        ("volumes: [{name: a, emptyDir: }]", "}", "emptyDir is empty; write emptyDir: {}"),
        ("volumes: [{name: a, secret: {name: b, secretName: b}}]", "name: b", "unknown key 'name'"),
        (
            "volumes: [{name: a, emptyDirr: {}}]",
            "emptyDirr",
            "unknown key 'emptyDirr'; did you mean 'emptyDir'?",
        ),
        ("volumes: [{name: a, hostPath: {path: /a}, nfs: {server: s, path: /}}]", "{server", "keep one"),
        ("volumeMounts: {name: a}", "{name", "volumeMounts must be a list of {name: scratch, mountPath"),
        ("volume_mounts: [{name: a, mountPath: /a}]", "a,", "no volume 'a'; the task has no 'volumes'"),
        ("volume_mounts: [{mount_path: /a}]", "mount_path", "Kubernetes writes 'mountPath'"),
        (
            "imagePullPolicy: Sometimes",
            "Sometimes",
            "imagePullPolicy is 'Sometimes'; use one of: Always, IfNotPresent",
        ),
        ("image_pull_policy: always", "always", "did you mean 'Always'?"),
        (
            "image_pull_secrets: [Registry_1]",
            "Registry_1",
            "image_pull_secrets: 'Registry_1' is no name of Kubernetes",
        ),
        (
            "security_context: {priviledged: true}",
            "priviledged",
            "unknown key 'priviledged'; did you mean 'privileged'?",
        ),
        (
            "security_context: {run_as_user: 1}",
            "run_as_user",
            "unknown key 'run_as_user'; Kubernetes writes 'runAsUser'",
        ),
        (
            "security_context: {runAsUser: root}",
            "root",
            "runAsUser must be a whole number, found the text 'root'",
        ),
        ("security_context: {privileged: 1}", "1", "privileged must be true or false, found 1"),
        ("security_context: {capabilities: {drop: ALL}}", "ALL", "drop must be a list, found the text 'ALL'"),
        ("node_selector: [a]", "[a", "node_selector: expected a mapping (key: value), found a list"),
        ("node_selector: {spot: true}", "true", "must be text, found the boolean true; write it in quotes"),
        ("tolerations: {key: a}", "{key", "tolerations must be a list of {key, operator, value, effect}"),
        ("tolerations: [{key: a, effect: NoScheduel}]", "NoScheduel", "did you mean 'NoSchedule'?"),
        ("tolerations: [{value: a}]", "{value", "a toleration needs 'key', or operator: Exists"),
        ("tolerations: [{operator: Exists, value: b}]", "b", "operator Exists takes no value"),
        ("labels: {team: 'a b'}", "'a b'", "labels: 'a b' cannot be the value of a label"),
        ("annotations: {'a b': c}", "c", "annotations: 'a b' cannot be the name of an annotation"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused_where_it_stands(field: str, at: str, said: str) -> None:
    """``at``: what stands at the place of the error."""
    [error] = errors_of(running(field if field.startswith("image:") else f"{field}\nimage: i"))
    assert said in error
    assert error.startswith(f"sample.yaml:8:{7 + field.index(at)}: step 'start'")


def test_a_container_without_an_image_is_refused() -> None:
    [problem] = problems_of(running("command: echo"))
    assert (problem.message, problem.kind) == (
        "step 'start': container needs 'image'",
        ProblemKind.MISSING_FIELD,
    )


def test_what_is_wrong_below_runtime_is_reported_there() -> None:
    steps = running("runtime:\n  image: i\n  env: {A: [1]}\nenv: {B: b, C: [2]}")
    assert errors_of(steps) == [
        "sample.yaml:10:18: step 'start': env: 'A' must be text, found a list",
        "sample.yaml:11:22: step 'start': env: 'C' must be text, found a list",
    ]


def test_a_mount_names_one_of_the_volumes() -> None:
    fields = "image: i\nvolumes: [{name: scratch, emptyDir: {}}]\nvolume_mounts: [{name: scrach, mountPath: /a}]"
    assert errors_of(running(fields)) == [
        "sample.yaml:10:30: step 'start', volume_mounts 1: no volume 'scrach'; did you mean 'scratch'?"
    ]


@pytest.mark.parametrize(
    ("shape", "model"),
    [
        (container.VARIABLE, "V1EnvVar"),
        (container.VARIABLES_FROM, "V1EnvFromSource"),
        (container.MOUNT, "V1VolumeMount"),
        (container.VOLUME, "V1Volume"),
        (shapes.TOLERATION, "V1Toleration"),
        (container.SECURITY, "V1SecurityContext"),
        (container.RESOURCES, "V1ResourceRequirements"),
    ],
)
def test_the_shapes_are_those_of_kubernetes(shape: shapes.Shape, model: str) -> None:
    """None of what the cluster knows is refused; of what it knows later there is a newer client."""
    assert set(shape) == set(getattr(kubernetes.client, model).attribute_map.values())
