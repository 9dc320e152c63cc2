"""The volumes of a pod, as folders."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from tests.kubernetes.cluster.kubelet.environment import Incomplete, contents, field
from tests.kubernetes.cluster.rights import Rights
from tests.kubernetes.cluster.store import Object, Store

ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
VERSION = "..2025_01_01_00_00_00.1"
"""The folder of the files of a ConfigMap or Secret."""

Mount = tuple[str, str, bool]
"""Source, target, whether it is read-only."""


class Volumes:
    """Makes the folders of one pod's volumes.

    Raises:
        Incomplete: a ConfigMap, a Secret, a claim or a key is missing and not optional.
    """

    def __init__(self, store: Store, rights: Rights, pod: Object, folder: Path, shared: Path) -> None:
        self._store, self._rights, self._pod = store, rights, pod
        self._namespace = pod["metadata"]["namespace"]
        self._folder, self._shared = folder, shared
        for volume in pod["spec"].get("volumes") or ():
            self._make(volume)

    def mounts(self, container: Object) -> list[Mount]:
        """The mounts of a container, those of short targets first."""
        found = []
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes") or ()}
        for mount in container.get("volumeMounts") or ():
            volume = volumes[mount["name"]]
            source = self._source(volume)
            fixed = any(name in volume for name in ("configMap", "secret", "projected", "downwardAPI"))
            found.append((str(source), mount["mountPath"], fixed or bool(mount.get("readOnly"))))
        return sorted(found, key=lambda mount: len(mount[1]))

    def _source(self, volume: Object) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return self._shared / self._namespace / volume["persistentVolumeClaim"]["claimName"]
        return self._folder / "volumes" / str(volume["name"])

    def _make(self, volume: Object) -> None:
        folder = self._source(volume)
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            if self._store.get("PersistentVolumeClaim", self._namespace, name) is None:
                message = f'0/1 nodes are available: persistentvolumeclaim "{name}" not found.'
                raise Incomplete(message, "FailedScheduling")
        folder.mkdir(parents=True, exist_ok=True)
        for source in (volume.get("projected") or {}).get("sources", [volume]):
            try:
                self._write(folder, source)
            except Incomplete as error:
                raise _unmounted(volume, str(error)) from None

    def _write(self, folder: Path, source: Object) -> None:
        for name, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            if name in source:
                given = source[name]
                key = given.get("name") or given.get("secretName")
                optional = given.get("optional", False)
                content = contents(self._store, kind, self._namespace, key, optional)
                self._write_items(folder, f"{kind} {key}", content, given.get("items"), optional)
        for item in (source.get("downwardAPI") or {}).get("items") or ():
            _write(folder / item["path"], field(self._pod, item["fieldRef"]["fieldPath"]).encode())
        if "serviceAccountToken" in source:
            token = self._rights.token(self._namespace, self._pod["spec"]["serviceAccountName"])
            _write(folder / source["serviceAccountToken"]["path"], token.encode())

    def _write_items(
        self, folder: Path, name: str, content: dict[str, bytes], items: list[Object] | None, optional: bool
    ) -> None:
        if items is None:
            items = [{"key": key, "path": key} for key in content]
        for item in items:
            if item["key"] in content:
                _link(folder, item["path"], content[item["key"]])
            elif not optional:
                raise Incomplete(f"{name} references non-existent key: {item['key']}")


def _unmounted(volume: Object, why: str) -> Incomplete:
    return Incomplete(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {why}', "FailedMount")


def account_volume(name: str) -> Object:
    """What the API server adds to a pod whose account's token is mounted."""
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {
            "downwardAPI": {
                "items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]
            }
        },
    ]
    return {"name": name, "projected": {"sources": sources, "defaultMode": 420}}


def image_name(image: str) -> str:
    """An image without tag and digest."""
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def runs_here(image: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(image_name(image), pattern) for pattern in patterns)


def _link(folder: Path, path: str, content: bytes) -> None:
    """Writes a file as the kubelet does: into a folder that a link names, which links from outside go through."""
    _write(folder / VERSION / path, content)
    first = Path(path).parts[0]
    for link, target in ((folder / "..data", VERSION), (folder / first, f"..data/{first}")):
        if not link.is_symlink():
            link.symlink_to(target)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
