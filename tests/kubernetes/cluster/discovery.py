"""What the API says of itself."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.cluster.kinds import KINDS, Kind, groups

VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"}
_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force")
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def described(path: str) -> dict[str, Any] | None:
    """The answer at an address without objects; None where there is no such address."""
    match path.strip("/").split("/"):
        case ["version"]:
            return dict(VERSION)
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(name) for name in groups() if name],
            }
        case ["apis", group] if group in groups():
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(group)}
        case ["api", version]:
            return _resources("", version)
        case ["apis", group, version]:
            return _resources(group, version)
        case ["openapi", "v3"]:
            paths = {_path(kind): {"serverRelativeURL": f"/openapi/v3/{_path(kind)}"} for kind in KINDS}
            return {"paths": paths}
        case ["openapi", "v3", "api", version]:
            return _openapi("", version)
        case ["openapi", "v3", "apis", group, version]:
            return _openapi(group, version)
        case _:
            return None


def _group(name: str) -> dict[str, Any]:
    versions = [{"groupVersion": f"{name}/{version}", "version": version} for version in groups()[name]]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def _path(kind: Kind) -> str:
    return f"apis/{kind.api_version}" if kind.group else f"api/{kind.version}"


def _openapi(group: str, version: str) -> dict[str, Any] | None:
    """As much as clients look for: that the server itself checks fields (which it always does)."""
    paths: dict[str, Any] = {}
    for kind in KINDS:
        if (kind.group, kind.version) == (group, version):
            names = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in _PARAMETERS]
            what = {"group": group, "version": version, "kind": kind.name}
            patch = {"parameters": names, "responses": {}, "x-kubernetes-group-version-kind": what}
            middle = "namespaces/{namespace}/" if kind.namespaced else ""
            paths[f"/{_path(kind)}/{middle}{kind.plural}/{{name}}"] = {"patch": patch}
    if not paths:
        return None
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1"}, "paths": paths}


def _resources(group: str, version: str) -> dict[str, Any] | None:
    found = [kind for kind in KINDS if (kind.group, kind.version) == (group, version)]
    if not found:
        return None
    resources: list[dict[str, Any]] = []
    for kind in found:
        said = {"singularName": kind.name.lower(), "namespaced": kind.namespaced, "kind": kind.name}
        resources.append({"name": kind.plural, "verbs": _VERBS, **said})
        resources.append({"name": f"{kind.plural}/status", "verbs": ["get", "patch", "update"], **said})
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": found[0].api_version,
        "resources": resources,
    }
