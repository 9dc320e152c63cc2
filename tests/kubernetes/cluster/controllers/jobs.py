"""Jobs: pods until enough of them have succeeded."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.kubernetes.cluster.controllers.pods import is_ready, make_pod
from tests.kubernetes.cluster.events import warn
from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.cluster.store import Change, Key, Object, Store, key_of, now, owned_by


class Jobs:
    """Looks after every job.

    Args:
        create: makes a pod as the API does.
        end: deletes an object as the API does.
    """

    def __init__(self, store: Store, create: Callable[[Object], Object], end: Callable[[Key], None]) -> None:
        self._store, self._create, self._end = store, create, end
        self._ended: dict[str, dict[str, str]] = {}

    def note(self, change: Change) -> None:
        """Remembers how a pod ended, which may be gone before anybody looks."""
        phase = (change.object.get("status") or {}).get("phase")
        if change.key[0] != "Pod" or phase not in ("Succeeded", "Failed"):
            return
        for owner in change.object["metadata"].get("ownerReferences") or ():
            self._ended.setdefault(owner["uid"], {})[change.object["metadata"]["uid"]] = phase

    def sync(self) -> None:
        for job in self._store.list("Job"):
            self._sync(job)

    def _sync(self, job: Object) -> None:
        key, spec, status = key_of("Job", job), job["spec"], job.get("status") or {}
        if any(one["type"] in ("Complete", "Failed") for one in status.get("conditions") or ()):
            self._expire(key, spec, status)
            return
        pods = [pod for pod in self._store.list("Pod", key[1]) if owned_by(pod, job)]
        ended = self._ended.get(job["metadata"]["uid"], {})
        succeeded = sum(phase == "Succeeded" for phase in ended.values())
        failed = sum(phase == "Failed" for phase in ended.values())
        active = [pod for pod in pods if pod["metadata"]["uid"] not in ended]
        restarts = sum(_restarts(pod) for pod in active)
        fields: dict[str, Any] = {"succeeded": succeeded, "failed": failed, "active": len(active)}
        fields = {name: count for name, count in fields.items() if count or name in status}
        fields |= {
            "ready": sum(is_ready(pod) for pod in active),
            "startTime": status.get("startTime") or now(),
        }
        deadline = spec.get("activeDeadlineSeconds")
        if succeeded >= spec.get("completions", 1):
            fields |= {"completionTime": now(), "conditions": _conditions("SuccessCriteriaMet", "Complete")}
        elif failed + restarts > spec.get("backoffLimit", 6):
            self._stop(active)
            reason = "BackoffLimitExceeded"
            fields |= {"conditions": _conditions("FailureTarget", "Failed", reason=reason), "active": 0}
        elif deadline is not None and _age(fields["startTime"]) > deadline:
            self._stop(active)
            conditions = _conditions("FailureTarget", "Failed", reason="DeadlineExceeded")
            fields |= {"conditions": conditions, "active": 0}
        elif not active and not spec.get("suspend"):
            self._start(job)
        self._store.status(key, **fields)

    def _start(self, job: Object) -> None:
        labels = {
            "controller-uid": job["metadata"]["uid"],
            "job-name": job["metadata"]["name"],
            "batch.kubernetes.io/controller-uid": job["metadata"]["uid"],
            "batch.kubernetes.io/job-name": job["metadata"]["name"],
        }
        try:
            self._create(make_pod(job, job["spec"]["template"], labels))
        except Refused as error:
            warn(self._store, job, "FailedCreate", f"Error creating: {error}")  # the next look tries again

    def _stop(self, pods: list[Object]) -> None:
        for pod in pods:
            self._end(key_of("Pod", pod))

    def _expire(self, key: Key, spec: Object, status: Object) -> None:
        kept = spec.get("ttlSecondsAfterFinished")
        ended = status["conditions"][-1]["lastTransitionTime"]
        if kept is not None and _age(ended) >= kept:
            self._end(key)


def _conditions(*types: str, reason: str = "CompletionsReached") -> list[Object]:
    return [
        {
            "type": type,
            "status": "True",
            "reason": reason,
            "lastProbeTime": now(),
            "lastTransitionTime": now(),
        }
        for type in types
    ]


def _age(text: str) -> float:
    return time.time() - datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()


def _restarts(pod: Object) -> int:
    return sum(one["restartCount"] for one in (pod.get("status") or {}).get("containerStatuses") or ())
