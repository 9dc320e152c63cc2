"""A pod from its start to its end, in a thread."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes.cluster.events import warn
from tests.kubernetes.cluster.kubelet.container import Container, Recorded, Unpulled
from tests.kubernetes.cluster.kubelet.environment import Incomplete
from tests.kubernetes.cluster.kubelet.volumes import Mount, Volumes, runs_here
from tests.kubernetes.cluster.rights import Rights
from tests.kubernetes.cluster.store import Object, Store, key_of, now

STEP_SECONDS = 0.03
UNPULLED = "missing/"
"""Beginning of the names of images that no registry has."""


@dataclass(frozen=True)
class Machine:
    """What pods run on.

    Attributes:
        folder: of logs, volumes and hosts files.
        images: patterns of the names of images that run here; pods of others are recorded only.
        pace: by which the periods of probes and the pauses between restarts are shortened.
        variables: that every container gets, those of the API's address.
        removed: takes an ended pod out of the store.
    """

    store: Store
    rights: Rights
    folder: Path
    images: tuple[str, ...]
    pace: float
    variables: Mapping[str, str]
    removed: Callable[[Object], None]


class Pod:
    """Carries out one pod; stops when the pod has ended and its object is deleted, or at :meth:`kill`."""

    def __init__(self, machine: Machine, pod: Object, address: str, hosts: str) -> None:
        self.object, self.address = pod, address
        self.uid = pod["metadata"]["uid"]
        self.folder = machine.folder / "pods" / self.uid
        self.folder.mkdir(parents=True)
        self._machine = machine
        self._key = key_of("Pod", pod)
        self._volumes: Volumes | None = None
        self._unscheduled = ""
        self._over = threading.Event()
        self._began = now()
        self.write_hosts(hosts)
        self._first = [self._container(spec, True) for spec in pod["spec"].get("initContainers") or ()]
        self.containers = [self._container(spec, False) for spec in pod["spec"]["containers"]]
        self.thread = threading.Thread(target=self._run, name=self._key[2], daemon=True)
        self.thread.start()

    @property
    def all(self) -> list[Container | Recorded | Unpulled]:
        return [*self._first, *self.containers]

    def write_hosts(self, hosts: str) -> None:
        """Writes the names that the pod knows; in place, as the file is mounted."""
        name = self.object["metadata"]["name"]
        own = f"{self.address} localhost {name}\n"
        with (self.folder / "hosts").open("r+" if (self.folder / "hosts").exists() else "w") as file:
            file.write(own + hosts)
            file.truncate()

    def kill(self) -> None:
        """Ends everything of the pod at once; its thread ends too."""
        self._over.set()
        self.thread.join()
        for container in self.all:
            container.end(0)

    def lose(self) -> None:
        """Kills its processes, as a node does that goes: nobody is told."""
        for container in self.all:
            if isinstance(container, Container) and container.process is not None:
                container.process.kill()

    def _container(self, spec: Object, first: bool) -> Container | Recorded | Unpulled:
        machine, policy = self._machine, self.object["spec"].get("restartPolicy")
        if spec["image"].lower().startswith(UNPULLED):
            return Unpulled(spec)
        if not runs_here(spec["image"], machine.images):
            return Recorded(spec, self.object, machine, self.address, first or policy != "Always")
        return Container(spec, self.object, machine, self.address, self.folder, self._mounts)

    def _mounts(self, container: Object) -> list[Mount]:
        assert self._volumes is not None
        return [(str(self.folder / "hosts"), "/etc/hosts", False), *self._volumes.mounts(container)]

    def _has_volumes(self) -> bool:
        """Makes them where it can; says, as an event, why not."""
        machine = self._machine
        if self._volumes is None:
            try:
                claims = machine.folder / "claims"
                self._volumes = Volumes(machine.store, machine.rights, self.object, self.folder, claims)
                self._unscheduled = ""
            except Incomplete as error:
                self._unscheduled = str(error) if error.reason == "FailedScheduling" else ""
                warn(machine.store, self.object, error.reason, str(error))
        return self._volumes is not None

    def _run(self) -> None:
        store = self._machine.store
        while not self._over.is_set():
            found = store.get(*self._key)
            if found is None or found["metadata"]["uid"] != self.uid:
                self._end(0)
                return
            if "deletionTimestamp" in found["metadata"]:
                self._end(float(found["metadata"].get("deletionGracePeriodSeconds", 30)))
                self._report("Failed" if self._phase() != "Succeeded" else "Succeeded")
                self._machine.removed(self.object)
                shutil.rmtree(self.folder / "volumes", ignore_errors=True)
                return
            self._step()
            self._report(self._phase())
            self._over.wait(STEP_SECONDS if self._phase() in ("Pending", "Running") else 0.1)

    def _step(self) -> None:
        if not self._has_volumes():
            return
        for container in self._first:
            container.step(False)
            if container.exit_code != 0:
                return
        always = self.object["spec"].get("restartPolicy", "Always") == "Always"
        for container in self.containers:
            container.step(always)

    def _end(self, seconds: float) -> None:
        threads = [threading.Thread(target=one.end, args=(seconds,), daemon=True) for one in self.all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _phase(self) -> str:
        codes = [container.exit_code for container in self.containers]
        failed_first = any(one.exit_code for one in self._first)
        if failed_first or (None not in codes and any(codes)):
            return "Failed"
        if None not in codes:
            return "Succeeded"
        began = any(one.running or one.restarts or one.exit_code is not None for one in self.containers)
        return "Running" if began else "Pending"

    def _report(self, phase: str) -> None:
        old = (self._machine.store.get(*self._key) or {}).get("status", {})
        if self._unscheduled:
            placed = {**_condition("PodScheduled", False), "reason": "Unschedulable", "message": self._unscheduled}
            self._machine.store.status(self._key, phase=phase, conditions=_kept(old.get("conditions") or [], [placed]))
            return
        statuses = _same_times(old, "containerStatuses", self.containers)
        ready = all(one["ready"] for one in statuses)
        initialized = all(one.exit_code == 0 for one in self._first)
        conditions = [
            _condition("PodScheduled", True),
            _condition("Initialized", initialized),
            _condition("ContainersReady", ready),
            _condition("Ready", ready),
        ]
        fields: Object = {
            "phase": phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": "127.0.0.1",
            "startTime": self._began,
            "conditions": _kept(old.get("conditions") or [], conditions),
            "containerStatuses": statuses,
        }
        if self._first:
            fields["initContainerStatuses"] = _same_times(old, "initContainerStatuses", self._first)
        self._machine.store.status(self._key, **fields)


def _condition(type: str, holds: bool) -> Object:
    return {"type": type, "status": "True" if holds else "False", "lastTransitionTime": now()}


def _kept(old: list[Object], new: list[Object]) -> list[Object]:
    """Conditions, with the time of their last change where nothing has changed."""
    before = {(one["type"], one["status"]): one for one in old}
    return [before.get((one["type"], one["status"]), one) for one in new]


def _same_times(old: Object, name: str, containers: list[Container | Recorded]) -> list[Object]:
    """What containers say, recorded ones once: their times are those of the first look."""
    before = {one["name"]: one for one in old.get(name) or ()}
    said = []
    for container in containers:
        status = container.status()
        known = before.get(container.name)
        if isinstance(container, Recorded) and known and known["state"].keys() == status["state"].keys() != {"waiting"}:
            status = known
        said.append(status)
    return said
