"""Checks the literal fields of a task of ``kind: container`` against the rules of Kubernetes.

The shapes are a table of Kubernetes' fields; a test compares their keys with the official client's models. The
package kubernetes-validate would not replace it: it takes 108 MB, reports one error at a time, and accepts
quantities and names that a cluster refuses.
"""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects import kubernetes as k8s
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from noetl_dagster.playbook.wording import described, is_open, is_template, suggestion

_QUANTITIES = {
    "cpu": k8s.quantity("500m or 2"),
    "memory": k8s.quantity("512Mi or 4Gi", k8s.LEAST_BYTES),
    "ephemeral-storage": k8s.quantity("20Gi", k8s.LEAST_BYTES),
}

_REFERENCE: k8s.Shape = {"name": k8s.object_name, "optional": k8s.flag}
_KEY_OF: k8s.Shape = {**_REFERENCE, "key": k8s.text}
_FILES: k8s.Shape = {"items": k8s.some_list, "defaultMode": k8s.whole, "optional": k8s.flag}

VARIABLE: k8s.Shape = {
    "name": k8s.text,
    "value": k8s.any_text,
    "valueFrom": k8s.mapping(
        {
            **dict.fromkeys(("secretKeyRef", "configMapKeyRef"), k8s.mapping(_KEY_OF, "name", "key")),
            **dict.fromkeys(("fieldRef", "resourceFieldRef", "fileKeyRef"), k8s.some_mapping),
        }
    ),
}
VARIABLES_FROM: k8s.Shape = {
    "secretRef": k8s.mapping(_REFERENCE, "name"),
    "configMapRef": k8s.mapping(_REFERENCE, "name"),
    "prefix": k8s.any_text,
}
MOUNT: k8s.Shape = {
    "name": k8s.object_name,
    "mountPath": k8s.text,
    "readOnly": k8s.flag,
    "recursiveReadOnly": k8s.word("Disabled", "IfPossible", "Enabled"),
    "subPath": k8s.any_text,
    "subPathExpr": k8s.any_text,
    "mountPropagation": k8s.word("None", "HostToContainer", "Bidirectional"),
}
_OTHER_VOLUMES = (
    "awsElasticBlockStore azureDisk azureFile cephfs cinder csi downwardAPI ephemeral fc flexVolume flocker "
    "gcePersistentDisk gitRepo glusterfs image iscsi photonPersistentDisk portworxVolume projected quobyte rbd "
    "scaleIO storageos vsphereVolume"
)
VOLUME: k8s.Shape = {
    "name": k8s.object_name,
    "configMap": k8s.mapping({"name": k8s.object_name, **_FILES}, "name"),
    "secret": k8s.mapping({"secretName": k8s.object_name, **_FILES}, "secretName"),
    "emptyDir": k8s.mapping({"medium": k8s.any_text, "sizeLimit": k8s.quantity("20Gi")}),
    "hostPath": k8s.mapping({"path": k8s.text, "type": k8s.any_text}, "path"),
    "nfs": k8s.mapping({"server": k8s.text, "path": k8s.text, "readOnly": k8s.flag}, "server", "path"),
    "persistentVolumeClaim": k8s.mapping({"claimName": k8s.object_name, "readOnly": k8s.flag}, "claimName"),
    **dict.fromkeys(_OTHER_VOLUMES.split(), k8s.some_mapping),
}
SECURITY: k8s.Shape = {
    "allowPrivilegeEscalation": k8s.flag,
    "appArmorProfile": k8s.some_mapping,
    "capabilities": k8s.mapping({"add": k8s.words, "drop": k8s.words}),
    "privileged": k8s.flag,
    "procMount": k8s.word("Default", "Unmasked"),
    "readOnlyRootFilesystem": k8s.flag,
    "runAsGroup": k8s.whole,
    "runAsNonRoot": k8s.flag,
    "runAsUser": k8s.whole,
    "seLinuxOptions": k8s.some_mapping,
    "seccompProfile": k8s.mapping(
        {"type": k8s.word("RuntimeDefault", "Unconfined", "Localhost"), "localhostProfile": k8s.text}, "type"
    ),
    "windowsOptions": k8s.some_mapping,
}


def _amounts(block: Block, key: str) -> None:
    child = block.child(key)
    for name, value in {} if child is None else child.values.items():
        assert child is not None
        if is_template(str(name)) or is_open(value):
            continue
        if name in _QUANTITIES:
            _QUANTITIES[name](child, name)
        elif str(name).startswith("hugepages-"):
            k8s.quantity("128Mi")(child, name)
        elif "/" in str(name):
            wrong = k8s.devices_wrong(key, name, value)
            if wrong is not None:
                child.error(wrong, name)
        else:
            remedy = suggestion(str(name), (*_QUANTITIES, "nvidia.com/gpu"), "use")
            child.report_key(name, f"{name!r} is no resource; {remedy}", ProblemKind.UNKNOWN_FIELD)


RESOURCES: k8s.Shape = {"requests": _amounts, "limits": _amounts, "claims": k8s.some_list}


def check_container(block: Block) -> None:
    """Reports what is wrong with the fields of a container; what is a template is left to the cluster."""
    present = {
        names[0]: key
        for names in TOOL_KINDS["container"].spellings.values()
        for key in names
        if key in block and not is_open(block[key])
    }
    for name, check in _FIELDS.items():
        if name in present:
            check(block, present[name])
    _check_mounts(block, present.get("volume_mounts"), present.get("volumes"))


def _command(block: Block, key: str) -> None:
    if isinstance(block[key], list):
        k8s.words(block, key)
    elif not isinstance(block[key], str):
        found = described(block[key])
        block.error(f"{key} must be text, which a shell runs, or a list of words, found {found}", key)


def _args(block: Block, key: str) -> None:
    if isinstance(block[key], list):  # else it is the task's input
        k8s.words(block, key)


def _env(block: Block, key: str) -> None:
    """Reads a mapping of names to texts, or Kubernetes' list."""
    if not isinstance(block[key], list):
        k8s.texts(k8s.VARIABLES)(block, key)
        return
    for entry in k8s.entries(block, key, "{name: TZ, value: UTC}"):
        k8s.check_shape(entry, VARIABLE, ("name",))
        if entry.values.get("value") and entry.values.get("valueFrom"):
            entry.error("'value' and 'valueFrom' exclude each other; keep one", "valueFrom")
        name = entry.values.get("name")
        if isinstance(name, str) and not is_open(name):
            wrong = k8s.name_wrong("env", name, k8s.VARIABLES)
            if wrong is not None:
                entry.error(wrong, "name")


def _resources(block: Block, key: str) -> None:
    asked = block.child(key)
    if asked is None:
        return
    before = len(block.document.problems)
    k8s.check_shape(asked, RESOURCES)
    requests, limits = asked.values.get("requests"), asked.values.get("limits")
    if len(block.document.problems) > before or not isinstance(requests, dict) or not isinstance(limits, dict):
        return
    for name, request in requests.items():
        if limits.get(name) is not None and k8s.exceeds(request, limits[name]):
            place = block.document.place(requests, name)
            message = f"{name}: request {request} is more than limit {limits[name]}; raise the limit"
            block.document.report(place, f"{asked.what}: {message}")


def _volumes(block: Block, key: str) -> None:
    for entry in k8s.entries(block, key, "{name: scratch, emptyDir: {}}"):
        k8s.check_shape(entry, VOLUME, ("name",))
        kinds = [name for name in entry.values if name in VOLUME and name != "name"]
        if not kinds and set(entry.values) <= {"name"}:
            entry.missing("it says nothing of what it is, such as emptyDir: {}")
        for name in kinds:
            if entry[name] is None:
                entry.error(f"{name} is empty; write {name}: {{}}", name)
        if len(kinds) > 1:
            entry.error(f"{kinds[0]} and {kinds[1]} exclude each other; keep one", kinds[1])


def _pull_secrets(block: Block, key: str) -> None:
    """Reads one name, or a list of names and of Kubernetes' ``{name}``."""
    value = block[key]
    for index, one in enumerate(value if isinstance(value, list) else [value]):
        place = block.document.place(value, index) if value is not one else block.place_of(key)
        what = f"{block.what}, {key}"
        if isinstance(one, dict):
            k8s.check_shape(Block(block.reading, one, what, place), {"name": k8s.object_name}, ("name",))
        elif not isinstance(one, str):
            block.document.report(place, f"{what}: write the name of a secret, found {described(one)}")
        elif not is_template(one) and (wrong := k8s.object_wrong(one)) is not None:
            block.document.report(place, f"{what}: {wrong}")


def _check_mounts(block: Block, mounts: str | None, volumes: str | None) -> None:
    """Reports mounts of volumes that the task does not have, if all of its volumes are known."""
    if mounts is None or not isinstance(block[mounts], list):
        return
    if volumes is None and block.values.get("volumes") is not None:  # a template
        return
    given: Any = [] if volumes is None else block[volumes]
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        return
    names = tuple(str(one["name"]) for one in given if not is_open(one.get("name")))
    if len(names) < len(given):
        return
    for index, entry in enumerate(block[mounts]):
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str) and not is_open(name) and name not in names:
            remedy = suggestion(name, names, "volumes") if names else "the task has no 'volumes'"
            message = f"{block.what}, {mounts} {index + 1}: no volume {name!r}; {remedy}"
            block.document.report(block.document.place(entry, "name"), message)


_FIELDS: dict[str, k8s.Check] = {
    "image": k8s.text,
    "command": _command,
    "args": _args,
    "env": _env,
    "env_from": k8s.listed(VARIABLES_FROM, example="{secretRef: {name: keys}}"),
    "namespace": k8s.object_name,
    "service_account": k8s.object_name,
    "resources": _resources,
    "volumes": _volumes,
    "volume_mounts": k8s.listed(MOUNT, "name", "mountPath", example="{name: scratch, mountPath: /scratch}"),
    "working_dir": k8s.text,
    "node_selector": k8s.texts(k8s.LABELS, quoted=True),
    "tolerations": k8s.tolerations,
    "image_pull_policy": k8s.word(*k8s.PULL_POLICIES),
    "image_pull_secrets": _pull_secrets,
    "security_context": k8s.mapping(SECURITY),
    "labels": k8s.texts(k8s.LABELS),
    "annotations": k8s.texts(k8s.ANNOTATIONS),
}
