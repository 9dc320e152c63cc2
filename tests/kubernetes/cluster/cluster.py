"""The cluster: everything together."""

from __future__ import annotations

import base64
import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.kubernetes.cluster.admission import Admission
from tests.kubernetes.cluster.api import Api, Server
from tests.kubernetes.cluster.certificates import certificate
from tests.kubernetes.cluster.controllers.jobs import Jobs
from tests.kubernetes.cluster.controllers.workloads import Workloads
from tests.kubernetes.cluster.failures import Refused, not_found
from tests.kubernetes.cluster.kinds import kind_named
from tests.kubernetes.cluster.kubelet.container import Container
from tests.kubernetes.cluster.kubelet.pod import Machine, Pod
from tests.kubernetes.cluster.requests import Address, Objects
from tests.kubernetes.cluster.rights import Rights
from tests.kubernetes.cluster.services import Services
from tests.kubernetes.cluster.store import Object, Store, key_of

IMAGES = ("ghcr.io/noetl/noetl-dagster", "noetl-dagster", "busybox")
PORT = 6443
SYNC_SECONDS = 0.2


class Cluster:
    """A running stand-in.

    Attributes:
        kubeconfig: path of a file with an administrator's access.
        address: of the API server; pods and services have addresses beside it.
        store: all objects.

    Args:
        images: patterns of the names of images that run here; pods of others are recorded and ready at once.
        pace: by which the periods of probes and the pauses between restarts are shortened.
    """

    def __init__(
        self,
        folder: Path,
        images: tuple[str, ...] = IMAGES,
        pace: float = 0.05,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.store = Store()
        self.rights = Rights(self.store)
        self._net = _free_net()
        self.address = f"{self._net}.0.1"
        self._numbers = itertools.count(2)
        self.objects = Objects(self.store, Admission(self.store, self._next_address))
        variables = {"KUBERNETES_SERVICE_HOST": self.address, "KUBERNETES_SERVICE_PORT": str(PORT)}
        self._machine = Machine(self.store, self.rights, folder, images, pace, variables, self._removed)
        self._pods: dict[str, Pod] = {}
        self._services = Services(self.store)
        self._jobs = Jobs(self.store, self.create, self.objects.end)
        self._workloads = Workloads(self.store, self.create, self.objects.end)
        self.api = Api(self.objects, self.rights, self._log)
        self._server = Server((self.address, PORT), self.api, certificate(folder, self.address))
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(self.config_of(self.rights.administrator))
        self._over = threading.Event()
        for name in ("default", "kube-system"):
            self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self._sync()
        self._thread = threading.Thread(target=self._control, name="controllers", daemon=True)
        self._thread.start()
        self._server.begin()

    def config_of(self, token: str, namespace: str = "default") -> str:
        """A kubeconfig for a token."""
        authority = base64.b64encode((self.folder / "ca.crt").read_bytes()).decode()
        server = {"server": f"https://{self.address}:{PORT}", "certificate-authority-data": authority}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": server}],
                "users": [{"name": "me", "user": {"token": token}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": namespace}}],
            }
        )

    def create(self, given: Object) -> Object:
        """Makes an object as the API does."""
        kind = kind_named(given["kind"])
        namespace = given["metadata"].get("namespace", "default") if kind.namespaced else ""
        return self.objects.create(Address(kind, namespace, "", ""), given, {})

    def pods(self, labels: str = "", namespace: str = "default") -> list[Object]:
        """Pods that a selector fits, the oldest first."""
        address = Address(kind_named("Pod"), namespace, "", "")
        found: list[Object] = self.objects.list(address, {"labelSelector": labels})["items"]
        return found

    def lose(self, name: str, namespace: str = "default") -> None:
        """Kills the processes of a pod, all at once and without a word."""
        self._pod(namespace, name).lose()

    def delete(self, kind: str, name: str, namespace: str = "default", grace: int | None = None) -> None:
        """Deletes an object, and what belongs to it, as ``kubectl delete`` does."""
        self.store.need(kind, namespace, name)
        self.objects.end((kind, namespace, name), grace=grace)

    def processes(self, name: str, namespace: str = "default") -> dict[str, int]:
        """Process ids of the running containers of a pod, by their names; none while it is not begun."""
        try:
            containers = self._pod(namespace, name).containers
        except Refused:
            return {}
        return {one.name: one.process.pid for one in containers if one.running and one.process is not None}

    def log(self, name: str, namespace: str = "default", container: str = "") -> str:
        """What a container of a pod has written."""
        return self._log(namespace, name, container, {}).decode(errors="replace")

    def said(self) -> str:
        """Everything that every container has written, for a failing test."""
        logs = sorted(self.folder.glob("pods/*/*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"--- {path.stem}\n{path.read_text(errors='replace')[-4000:]}" for path in logs)

    @contextmanager
    def refusing(self, refuse: Callable[[str, str], Refused | None]) -> Iterator[None]:
        """Requests fail for which ``refuse(method, path)`` gives an answer."""
        before, self.api.refuse = self.api.refuse, refuse
        yield
        self.api.refuse = before

    def close(self) -> None:
        """Ends every process, thread and socket of the cluster; once is enough."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        pods = list(self._pods.values())
        threads = [threading.Thread(target=pod.kill) for pod in pods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._services.close()
        self._server.end()

    def _control(self) -> None:
        since = 0
        while not self._over.is_set():
            changes, since = self.store.changes(since, SYNC_SECONDS)
            for change in changes:
                self._jobs.note(change)
            self._sync()

    def _sync(self) -> None:
        for namespace in self.store.list("Namespace"):
            self._furnish(namespace["metadata"]["name"])
        self._jobs.sync()
        self._workloads.sync()
        self.objects.collect()
        self._services.update()
        known = {pod.uid for pod in self._pods.values()}
        hosts: dict[str, str] = {}
        for pod in self.store.list("Pod"):
            metadata = pod["metadata"]
            space = metadata["namespace"]
            hosts.setdefault(space, self._services.hosts(space))
            if metadata["uid"] not in known:
                self._pods[metadata["uid"]] = Pod(self._machine, pod, self._next_address(), hosts[space])
        for uid, one in list(self._pods.items()):
            if not one.thread.is_alive():
                del self._pods[uid]
            else:
                one.write_hosts(hosts.get(one.object["metadata"]["namespace"], ""))

    def _furnish(self, namespace: str) -> None:
        """What every namespace has."""
        if self.store.get("ServiceAccount", namespace, "default") is None:
            metadata = {"name": "default", "namespace": namespace}
            self.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        if self.store.get("ConfigMap", namespace, "kube-root-ca.crt") is None:
            metadata = {"name": "kube-root-ca.crt", "namespace": namespace}
            data = {"ca.crt": (self.folder / "ca.crt").read_text()}
            self.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    def _removed(self, pod: Object) -> None:
        self.store.remove(key_of("Pod", pod))

    def _pod(self, namespace: str, name: str) -> Pod:
        found = self.store.need("Pod", namespace, name)
        pod = self._pods.get(found["metadata"]["uid"])
        if pod is None:
            raise not_found("pods", name)
        return pod

    def _log(self, namespace: str, name: str, container: str, query: Mapping[str, str]) -> bytes:
        pod = self._pod(namespace, name)
        named = [one for one in pod.all if one.name == container] if container else pod.containers[:1]
        if not named:
            raise Refused(400, "BadRequest", f"container {container} is not valid for pod {name}")
        [one] = named
        if not isinstance(one, Container):
            return b""
        while query.get("follow") == "true" and one.exit_code is None and not self._over.wait(0.02):
            pass
        text = one.log.read_bytes() if one.log.exists() else b""
        if "tailLines" in query:
            text = b"".join(text.splitlines(keepends=True)[-int(query["tailLines"]) :])
        return text[: int(query["limitBytes"])] if "limitBytes" in query else text

    def _next_address(self) -> str:
        number = next(self._numbers)
        return f"{self._net}.{number // 250}.{number % 250 + 2}"


def _free_net() -> str:
    """Two numbers of loopback addresses that no other cluster of this machine has."""
    while True:
        net = f"127.{random.randint(64, 254)}"
        with socket.socket() as tried:
            try:
                tried.bind((f"{net}.0.1", PORT))
            except OSError:
                continue
        return net
