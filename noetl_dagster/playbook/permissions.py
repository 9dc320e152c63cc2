"""Rights of pods that an installation has to allow: of the host, more privileges, service accounts and Secrets.

It reads a pod's spec in the words of Kubernetes, so that it applies to literal and to rendered fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any, NamedTuple

from noetl_dagster.playbook.pods import Pod

SETTING = "NOETL_CONTAINER_ALLOW"

_HOST = ("hostNetwork", "hostPID", "hostIPC")
_FREE_VOLUMES = frozenset({"configMap", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim"})
"""Kinds of volumes that hold neither the host's files nor Secrets."""

_PROFILES = ("seccompProfile", "appArmorProfile")
_PROFILE_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
_OPTIONS = ("seLinuxOptions", "windowsOptions")


class Right(NamedTuple):
    """A right that a pod asks for.

    Attributes:
        name: its kind, such as ``hostPath``.
        value: what it applies to, such as a path; empty for a kind without values.
        field: that asks for it.
    """

    name: str
    value: str
    field: str

    def __str__(self) -> str:
        return f"{self.name}:{self.value}" if self.value else self.name


def spec_of_task(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a pod's spec that the fields of a ``container`` task can ask rights with."""
    container = {
        "securityContext": config.get("security_context"),
        "envFrom": config.get("env_from"),
        "env": config.get("env"),
    }
    account, volumes = config.get("service_account"), config.get("volumes")
    return {"serviceAccountName": account, "volumes": volumes, "containers": [container]}


def spec_of_pod(pod: Pod) -> dict[str, Any]:
    """Returns the same of the pod of a run or a step."""
    sources = [{"secretRef": {"name": name}} for name in pod.env_secrets]
    return {"serviceAccountName": pod.service_account, "containers": [{"envFrom": sources}]}


def refused(pod: Mapping[str, Any], allowed: Collection[str], annotations: Any = None) -> list[Right]:
    """Returns the rights that a pod's spec and annotations ask for and that ``NOETL_CONTAINER_ALLOW`` does not list."""
    asked = [*_asked(pod)]
    for name, value in annotations.items() if isinstance(annotations, Mapping) else ():
        if str(name).startswith(_PROFILE_ANNOTATION):
            asked.append(Right("appArmorProfile", str(value), "annotations"))
    return [right for right in asked if not any(_covers(entry, right) for entry in allowed)]


def refusal(rights: Collection[Right]) -> str:
    """Describes refused rights, and the fix."""
    fields = ", ".join(f"{right} ({right.field})" for right in rights)
    return (
        f"this installation does not allow {fields}; leave it out, or let its operator add "
        f"{', '.join(map(str, rights))} to {SETTING}"
    )


def _covers(entry: str, right: Right) -> bool:
    name, _, value = entry.partition(":")
    if name != right.name:
        return False
    if not value:
        return True
    if name == "hostPath":
        return PurePosixPath(normpath(right.value)).is_relative_to(normpath(value))
    return value == right.value


def _asked(pod: Mapping[str, Any]) -> Iterator[Right]:
    account = pod.get("serviceAccountName") or pod.get("serviceAccount")
    if account:
        yield Right("serviceAccount", str(account), "service_account")
    yield from (Right(name, "", name) for name in _HOST if _is_set(pod.get(name)))
    for volume in _mappings(pod.get("volumes")):
        yield from _of_volume(volume)
    yield from _of_security(pod.get("securityContext"))
    for container in (*_mappings(pod.get("containers")), *_mappings(pod.get("initContainers"))):
        yield from _of_security(container.get("securityContext"))
        for source in _mappings(container.get("envFrom")):
            yield from _of_secret(source.get("secretRef"), "env_from")
        for variable in _mappings(container.get("env")):
            value_from = variable.get("valueFrom")
            if isinstance(value_from, Mapping):
                yield from _of_secret(value_from.get("secretKeyRef"), "env")


def _of_volume(volume: Mapping[str, Any]) -> Iterator[Right]:
    for kind, source in volume.items():
        fields = source if isinstance(source, Mapping) else {}
        if kind == "hostPath":
            yield Right(kind, str(fields.get("path") or "/"), "volumes")
        elif kind == "secret":
            yield Right(kind, str(fields.get("secretName") or ""), "volumes")
        elif kind == "projected":
            for part in _mappings(fields.get("sources")):
                yield from _of_secret(part.get("secret"), "volumes")
                if "serviceAccountToken" in part:
                    yield Right("volume", "serviceAccountToken", "volumes")
        elif kind != "name" and kind not in _FREE_VOLUMES and source is not None:
            yield Right("volume", str(kind), "volumes")


def _of_secret(reference: Any, field: str) -> Iterator[Right]:
    if isinstance(reference, Mapping):
        yield Right("secret", str(reference.get("name") or ""), field)


def _of_security(context: Any) -> Iterator[Right]:
    if not isinstance(context, Mapping):
        return
    field = "security_context"
    for name in ("privileged", "allowPrivilegeEscalation"):
        if _is_set(context.get(name)):
            yield Right(name, "", field)
    capabilities = context.get("capabilities")
    if isinstance(capabilities, Mapping):
        added = capabilities.get("add") or ()
        names = [added] if isinstance(added, str) else added
        yield from (Right("capability", str(name).upper().removeprefix("CAP_"), field) for name in names)
    if str(context.get("runAsNonRoot")).lower() == "false":
        yield Right("runAsRoot", "", field)
    if context.get("procMount") not in (None, "Default"):
        yield Right("procMount", "", field)
    for name in _PROFILES:
        profile = context.get(name)
        if isinstance(profile, Mapping) and profile.get("type") != "RuntimeDefault":
            yield Right(name, str(profile.get("type") or ""), field)
    yield from (Right(name, "", field) for name in _OPTIONS if context.get(name))


def _is_set(value: Any) -> bool:
    return value not in (None, False, "", "false", "False")


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [one for one in values if isinstance(one, Mapping)] if isinstance(values, list | tuple) else []
