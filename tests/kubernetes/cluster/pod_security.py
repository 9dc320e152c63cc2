"""Pod security admission: what the Pod Security Standard ``restricted`` refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LABEL = "pod-security.kubernetes.io/enforce"

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_PROFILES = {"RuntimeDefault", "Localhost"}


def violations(spec: Mapping[str, Any]) -> list[str]:
    """What a pod's spec has that the standard forbids, in the words of Kubernetes; none if it is restricted."""
    return [*_of_pod(spec), *_of_containers(spec)]


def _of_pod(spec: Mapping[str, Any]) -> Iterator[str]:
    host = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    if host:
        yield f"host namespaces ({', '.join(f'{name}=true' for name in host)})"
    for volume in spec.get("volumes") or ():
        kinds = volume.keys() - {"name"} - _VOLUMES
        if kinds:
            yield f'restricted volume types (volume "{volume["name"]}" uses restricted volume type "{min(kinds)}")'


def _of_containers(spec: Mapping[str, Any]) -> Iterator[str]:
    pod = spec.get("securityContext") or {}
    for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        own, name = container.get("securityContext") or {}, container["name"]
        both = {**pod, **own}
        capabilities = own.get("capabilities") or {}
        if any("hostPort" in port for port in container.get("ports") or ()):
            yield f'hostPort (container "{name}" uses a hostPort)'
        if own.get("privileged"):
            yield f'privileged (container "{name}" must not set securityContext.privileged=true)'
        if own.get("allowPrivilegeEscalation") is not False:
            yield (
                f'allowPrivilegeEscalation != false (container "{name}" must set '
                "securityContext.allowPrivilegeEscalation=false)"
            )
        if "ALL" not in (capabilities.get("drop") or ()) or set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
            yield f'unrestricted capabilities (container "{name}" must set securityContext.capabilities.drop=["ALL"])'
        if both.get("runAsNonRoot") is not True:
            yield f'runAsNonRoot != true (pod or container "{name}" must set securityContext.runAsNonRoot=true)'
        if both.get("runAsUser") == 0:
            yield f'runAsUser=0 (pod or container "{name}" must not set runAsUser=0)'
        if (both.get("seccompProfile") or {}).get("type") not in _PROFILES:
            yield f'seccompProfile (pod or container "{name}" must set securityContext.seccompProfile.type)'
