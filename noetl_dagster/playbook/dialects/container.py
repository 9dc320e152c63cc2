"""Checks the literal fields of a task of ``kind: container`` against the rules of Kubernetes.

The shapes are a table of Kubernetes' fields; a test compares their keys with the official client's models. The
package kubernetes-validate would not replace it: it takes 108 MB, reports one error at a time, and accepts
quantities and names that a cluster refuses.
"""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.kubernetes import (
    ANNOTATIONS,
    LABELS,
    LEAST_BYTES,
    PULL_POLICIES,
    VARIABLES,
    Check,
    Shape,
    any_text,
    check_shape,
    devices_wrong,
    entries,
    exceeds,
    flag,
    is_open,
    listed,
    mapping,
    name_wrong,
    object_name,
    object_wrong,
    quantity,
    some_list,
    some_mapping,
    text,
    texts,
    tolerations,
    whole,
    word,
    words,
)
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from noetl_dagster.playbook.wording import described, is_template, suggestion

_QUANTITIES = {
    "cpu": quantity("500m or 2"),
    "memory": quantity("512Mi or 4Gi", LEAST_BYTES),
    "ephemeral-storage": quantity("20Gi", LEAST_BYTES),
}

_REFERENCE: Shape = {"name": object_name, "optional": flag}
_KEY_OF: Shape = {**_REFERENCE, "key": text}
_FILES: Shape = {"items": some_list, "defaultMode": whole, "optional": flag}

VARIABLE: Shape = {
    "name": text,
    "value": any_text,
    "valueFrom": mapping(
        {
            "secretKeyRef": mapping(_KEY_OF, "name", "key"),
            "configMapKeyRef": mapping(_KEY_OF, "name", "key"),
            "fieldRef": some_mapping,
            "resourceFieldRef": some_mapping,
            "fileKeyRef": some_mapping,
        }
    ),
}
VARIABLES_FROM: Shape = {
    "secretRef": mapping(_REFERENCE, "name"),
    "configMapRef": mapping(_REFERENCE, "name"),
    "prefix": any_text,
}
MOUNT: Shape = {
    "name": object_name,
    "mountPath": text,
    "readOnly": flag,
    "recursiveReadOnly": word("Disabled", "IfPossible", "Enabled"),
    "subPath": any_text,
    "subPathExpr": any_text,
    "mountPropagation": word("None", "HostToContainer", "Bidirectional"),
}
_OTHER_VOLUMES = (
    "awsElasticBlockStore azureDisk azureFile cephfs cinder csi downwardAPI ephemeral fc flexVolume flocker "
    "gcePersistentDisk gitRepo glusterfs image iscsi photonPersistentDisk portworxVolume projected quobyte rbd "
    "scaleIO storageos vsphereVolume"
)
VOLUME: Shape = {
    "name": object_name,
    "configMap": mapping({"name": object_name, **_FILES}, "name"),
    "secret": mapping({"secretName": object_name, **_FILES}, "secretName"),
    "emptyDir": mapping({"medium": any_text, "sizeLimit": quantity("20Gi")}),
    "hostPath": mapping({"path": text, "type": any_text}, "path"),
    "nfs": mapping({"server": text, "path": text, "readOnly": flag}, "server", "path"),
    "persistentVolumeClaim": mapping({"claimName": object_name, "readOnly": flag}, "claimName"),
    **dict.fromkeys(_OTHER_VOLUMES.split(), some_mapping),
}
SECURITY: Shape = {
    "allowPrivilegeEscalation": flag,
    "appArmorProfile": some_mapping,
    "capabilities": mapping({"add": words, "drop": words}),
    "privileged": flag,
    "procMount": word("Default", "Unmasked"),
    "readOnlyRootFilesystem": flag,
    "runAsGroup": whole,
    "runAsNonRoot": flag,
    "runAsUser": whole,
    "seLinuxOptions": some_mapping,
    "seccompProfile": mapping(
        {"type": word("RuntimeDefault", "Unconfined", "Localhost"), "localhostProfile": text}, "type"
    ),
    "windowsOptions": some_mapping,
}
RESOURCES: Shape = {
    "requests": lambda block, key: _amounts(block, key),
    "limits": lambda block, key: _amounts(block, key),
    "claims": some_list,
}


def check_container(block: Block) -> None:
    """Reports what is wrong with the fields of a container; what is a template is left to the cluster."""
    present = {
        names[0]: key
        for names in TOOL_KINDS["container"].fields
        for key in names
        if key in block and not is_open(block[key])
    }
    for name, check in _FIELDS.items():
        if name in present:
            check(block, present[name])
    _check_mounts(block, present.get("volume_mounts"), present.get("volumes"))


def _command(block: Block, key: str) -> None:
    """Text for a shell, or a list."""
    if isinstance(block[key], list):
        words(block, key)
    elif not isinstance(block[key], str):
        found = described(block[key])
        block.error(f"{key} must be text, which a shell runs, or a list of words, found {found}", key)


def _args(block: Block, key: str) -> None:
    if isinstance(block[key], list):  # else it is the task's input
        words(block, key)


def _env(block: Block, key: str) -> None:
    """A mapping of names to texts, or Kubernetes' list."""
    if not isinstance(block[key], list):
        texts(VARIABLES)(block, key)
        return
    for entry in entries(block, key, "{name: TZ, value: UTC}"):
        check_shape(entry, VARIABLE, ("name",))
        if entry.values.get("value") and entry.values.get("valueFrom"):
            entry.error("'value' and 'valueFrom' exclude each other; keep one", "valueFrom")
        name = entry.values.get("name")
        wrong = name_wrong("env", name, VARIABLES) if isinstance(name, str) and not is_open(name) else None
        if wrong is not None:
            entry.error(wrong, "name")


def _resources(block: Block, key: str) -> None:
    asked = block.inner(key)
    if asked is None:
        return
    before = len(block.document.problems)
    check_shape(asked, RESOURCES)
    requests, limits = asked.values.get("requests"), asked.values.get("limits")
    if (
        len(block.document.problems) > before
        or not isinstance(requests, dict)
        or not isinstance(limits, dict)
    ):
        return
    for name, request in requests.items():
        limit = limits.get(name)
        if limit is not None and exceeds(request, limit):
            place = block.document.place(requests, name)
            message = f"{name}: request {request} is more than limit {limit}; raise the limit"
            block.document.report(place, f"{asked.what}: {message}")


def _amounts(block: Block, key: str) -> None:
    """``{cpu: 500m, memory: 4Gi, nvidia.com/gpu: 1}``."""
    child = block.inner(key)
    if child is None:
        return
    for name, value in child.values.items():
        if is_template(str(name)) or is_open(value):
            continue
        if name in _QUANTITIES:
            _QUANTITIES[name](child, name)
        elif str(name).startswith("hugepages-"):
            quantity("128Mi")(child, name)
        elif "/" in str(name):
            wrong = devices_wrong(key, name, value)
            if wrong is not None:
                child.error(wrong, name)
        else:
            remedy = suggestion(str(name), (*_QUANTITIES, "nvidia.com/gpu"), "use")
            place = block.document.key_place(child.values, name)
            message = f"{child.what}: {name!r} is no resource; {remedy}"
            block.document.report(place, message, kind=ProblemKind.UNKNOWN_FIELD)


def _volumes(block: Block, key: str) -> None:
    for entry in entries(block, key, "{name: scratch, emptyDir: {}}"):
        check_shape(entry, VOLUME, ("name",))
        kinds = [name for name in entry.values if name in VOLUME and name != "name"]
        if not kinds and set(entry.values) <= {"name"}:
            entry.error("it says nothing of what it is, such as emptyDir: {}", kind=ProblemKind.MISSING_FIELD)
        for name in kinds:
            if entry[name] is None:
                entry.error(f"{name} is empty; write {name}: {{}}", name)
        if len(kinds) > 1:
            entry.error(f"{kinds[0]} and {kinds[1]} exclude each other; keep one", kinds[1])


def _pull_secrets(block: Block, key: str) -> None:
    """One name, or a list of names and of Kubernetes' ``{name}``."""
    value = block[key]
    for index, one in enumerate(value if isinstance(value, list) else [value]):
        place = block.document.place(value, index) if value is not one else block.place_of(key)
        what = f"{block.what}, {key}"
        if isinstance(one, dict):
            check_shape(Block(block.reading, one, what, place), {"name": object_name}, ("name",))
        elif not isinstance(one, str):
            block.document.report(place, f"{what}: write the name of a secret, found {described(one)}")
        elif not is_template(one) and (wrong := object_wrong(one)) is not None:
            block.document.report(place, f"{what}: {wrong}")


def _check_mounts(block: Block, mounts: str | None, volumes: str | None) -> None:
    """Reports mounts of volumes that the task does not have, if all of its volumes are known."""
    if mounts is None or not isinstance(block[mounts], list):
        return
    if volumes is None and block.values.get("volumes") is not None:  # a template
        return
    given: Any = [] if volumes is None else block[volumes]
    if not isinstance(given, list) or any(
        not isinstance(one, dict) or is_open(one.get("name")) for one in given
    ):
        return
    names = tuple(str(one["name"]) for one in given)
    for index, entry in enumerate(block[mounts]):
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str) and not is_open(name) and name not in names:
            remedy = suggestion(name, names, "volumes") if names else "the task has no 'volumes'"
            where = f"{block.what}, {mounts} {index + 1}"
            block.document.report(
                block.document.place(entry, "name"), f"{where}: no volume {name!r}; {remedy}"
            )


_FIELDS: dict[str, Check] = {
    "image": text,
    "command": _command,
    "args": _args,
    "env": _env,
    "env_from": listed(VARIABLES_FROM, example="{secretRef: {name: keys}}"),
    "namespace": object_name,
    "service_account": object_name,
    "resources": _resources,
    "volumes": _volumes,
    "volume_mounts": listed(MOUNT, "name", "mountPath", example="{name: scratch, mountPath: /scratch}"),
    "working_dir": text,
    "node_selector": texts(LABELS, quoted=True),
    "tolerations": tolerations,
    "image_pull_policy": word(*PULL_POLICIES),
    "image_pull_secrets": _pull_secrets,
    "security_context": mapping(SECURITY),
    "labels": texts(LABELS),
    "annotations": texts(ANNOTATIONS),
}
