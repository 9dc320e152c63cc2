"""Deployments and StatefulSets: so many pods of the latest template, replaced bit by bit.

There are no ReplicaSets between a Deployment and its pods.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.kubernetes.cluster.controllers.pods import is_ready, make_pod, template_hash
from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.cluster.store import Key, Object, Store, key_of, now, owned_by

HASH = "pod-template-hash"


class Workloads:
    """Looks after every workload; for the arguments see :class:`~.jobs.Jobs`."""

    def __init__(self, store: Store, create: Callable[[Object], Object], end: Callable[[Key], None]) -> None:
        self._store, self._create, self._end = store, create, end

    def sync(self) -> None:
        for kind in ("Deployment", "StatefulSet"):
            for workload in self._store.list(kind):
                self._sync(workload)

    def _sync(self, workload: Object) -> None:
        kind, spec = workload["kind"], workload["spec"]
        wanted = spec.get("replicas", 1)
        latest = template_hash(spec["template"])
        pods = [pod for pod in self._store.list("Pod", workload["metadata"]["namespace"]) if owned_by(pod, workload)]
        staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        new = [pod for pod in staying if pod["metadata"]["labels"].get(HASH) == latest]
        old = [pod for pod in staying if pod not in new]
        if kind == "Deployment":
            self._roll(workload, wanted, latest, new, old, len(pods) - len(staying))
        else:
            self._replace(workload, wanted, latest, pods, new, old)
        self._report(workload, wanted, latest, staying, new)

    def _roll(
        self, workload: Object, wanted: int, latest: str, new: list[Object], old: list[Object], leaving: int
    ) -> None:
        strategy = workload["spec"].get("strategy") or {}
        if strategy.get("type") == "Recreate":
            self._stop(old)
            if not old and not leaving:
                self._start(workload, latest, wanted - len(new))
            self._stop(new[wanted:])
            return
        rolling = strategy.get("rollingUpdate") or {}
        surge = _count(rolling.get("maxSurge", "25%"), wanted, math.ceil)
        missing = _count(rolling.get("maxUnavailable", "25%"), wanted, math.floor)
        if not surge and not missing:
            missing = 1
        self._start(workload, latest, min(wanted - len(new), wanted + surge - len(new) - len(old)))
        self._stop(new[wanted:])
        spare = sum(map(is_ready, [*new, *old])) - (wanted - missing)
        for pod in sorted(old, key=is_ready):  # first those that nobody would miss
            if is_ready(pod):
                if spare <= 0:
                    break
                spare -= 1
            self._end(key_of("Pod", pod))

    def _replace(
        self,
        workload: Object,
        wanted: int,
        latest: str,
        pods: list[Object],
        new: list[Object],
        old: list[Object],
    ) -> None:
        """One after the other, under names that stay."""
        names = [f"{workload['metadata']['name']}-{index}" for index in range(wanted)]
        there = {pod["metadata"]["name"] for pod in pods}
        for name in names:
            if name not in there:
                self._start(workload, latest, 1, name)
        if old and all(map(is_ready, new)):
            self._end(key_of("Pod", old[-1]))
        self._stop([pod for pod in new if pod["metadata"]["name"] not in names])

    def _start(self, workload: Object, latest: str, count: int, name: str = "") -> None:
        template = workload["spec"]["template"]
        for claim in workload["spec"].get("volumeClaimTemplates") or ():
            volume = {"name": claim["metadata"]["name"], "emptyDir": {}}
            template = {**template, "spec": {**template["spec"]}}
            template["spec"]["volumes"] = [*(template["spec"].get("volumes") or ()), volume]
        for _ in range(count):
            try:
                self._create(make_pod(workload, template, {HASH: latest}, name))
            except Refused as error:
                condition = {
                    "type": "ReplicaFailure",
                    "status": "True",
                    "message": str(error),
                    "reason": "FailedCreate",
                }
                self._store.status(key_of(workload["kind"], workload), conditions=[condition])
                return

    def _stop(self, pods: list[Object]) -> None:
        for pod in pods:
            self._end(key_of("Pod", pod))

    def _report(self, workload: Object, wanted: int, latest: str, pods: list[Object], new: list[Object]) -> None:
        ready, generation = sum(map(is_ready, pods)), workload["metadata"]["generation"]
        updated = len(new)
        old = workload.get("status") or {}
        fields: Object = {
            "replicas": len(pods),
            "updatedReplicas": updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
        }
        if workload["kind"] == "StatefulSet":
            fields |= {"currentReplicas": updated, "currentRevision": latest, "updateRevision": latest}
        if workload["kind"] == "Deployment":
            fields["unavailableReplicas"] = max(wanted - ready, 0)
            fields["conditions"] = self._conditions(old, wanted, ready, updated == wanted == len(pods))
        self._store.status(key_of(workload["kind"], workload), observedGeneration=generation, **fields)

    def _conditions(self, old: Object, wanted: int, ready: int, rolled: bool) -> list[Object]:
        done = rolled and ready >= wanted
        new = [
            _condition("Available", ready >= wanted, "MinimumReplicasAvailable"),
            _condition("Progressing", True, "NewReplicaSetAvailable" if done else "ReplicaSetUpdated"),
        ]
        before = {(one["type"], one["status"], one.get("reason")): one for one in old.get("conditions") or ()}
        kept = [before.get((one["type"], one["status"], one["reason"]), one) for one in new]
        failures = [one for one in old.get("conditions") or () if one["type"] == "ReplicaFailure"]
        return kept if rolled else [*kept, *failures]


def _condition(type: str, holds: bool, reason: str) -> Object:
    return {
        "type": type,
        "status": "True" if holds else "False",
        "reason": reason,
        "lastTransitionTime": now(),
        "lastUpdateTime": now(),
    }


def _count(value: int | str, of: int, rounded: Callable[[float], int]) -> int:
    return rounded(int(value[:-1]) * of / 100) if isinstance(value, str) else value
