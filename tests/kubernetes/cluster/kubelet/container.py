"""One container of a pod: started, probed, restarted, and how it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kubernetes.cluster.kubelet.environment import Incomplete, check_user, command, environment
from tests.kubernetes.cluster.kubelet.probes import Probes
from tests.kubernetes.cluster.kubelet.process import Process
from tests.kubernetes.cluster.kubelet.volumes import Mount
from tests.kubernetes.cluster.store import Object, now

if TYPE_CHECKING:
    from tests.kubernetes.cluster.kubelet.pod import Machine

FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0


class Container:
    """A container whose image runs here.

    Args:
        mounts: of the container; may raise :class:`Incomplete`.
    """

    def __init__(
        self,
        spec: Object,
        pod: Object,
        machine: Machine,
        address: str,
        folder: Path,
        mounts: Callable[[Object], list[Mount]],
    ) -> None:
        self.spec, self.name = spec, str(spec["name"])
        self.log = folder / f"{self.name}.log"
        self.process: Process | None = None
        self.restarts = 0
        self.exit_code: int | None = None
        self._pod, self._machine, self._address = pod, machine, address
        self._folder, self._mounts = folder, mounts
        self._probes: Probes | None = None
        self._waiting = "ContainerCreating"
        self._message = ""
        self._began = self._ended = ""
        self._last: Object = {}
        self._again = 0.0

    @property
    def running(self) -> bool:
        return self.process is not None and self.exit_code is None

    @property
    def ready(self) -> bool:
        return self.running and (self._probes is None or self._probes.ready)

    def step(self, restarts: bool) -> None:
        """Starts the container where it does not run and should, and notices its end.

        Args:
            restarts: whether it is started again however it ended.
        """
        if self.running:
            self._look(restarts)
        elif self.process is None and time.monotonic() >= self._again:
            self._start()

    def end(self, seconds: float) -> None:
        """Ends it: its hook, SIGTERM, and after a grace period SIGKILL for what is left."""
        if self._probes is not None:
            self._probes.stop()
        if self.process is None:
            return
        deadline = time.monotonic() + seconds
        hook = ((self.spec.get("lifecycle") or {}).get("preStop") or {}).get("exec")
        if hook and seconds and self.running:
            self.process.run(hook["command"], seconds)
        if seconds:
            self.process.terminate()
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.process.kill()
        if self.exit_code is None:
            self.exit_code, self._ended = self.process.poll(), now()

    def status(self) -> Object:
        """Its ``containerStatuses`` entry."""
        state: Object
        if self.exit_code is not None:
            state = {"terminated": self._terminated()}
        elif self.process is not None:
            state = {"running": {"startedAt": self._began}}
        else:
            state = {"waiting": {"reason": self._waiting} | ({"message": self._message} if self._message else {})}
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": self.spec["image"],
            "containerID": f"process://{self.process.pid if self.process else ''}",
            "ready": self.ready,
            "started": self.running and (self._probes is None or self._probes.started),
            "restartCount": self.restarts,
            "state": state,
            "lastState": self._last,
        }

    def _start(self) -> None:
        try:
            check_user(self._pod, self.spec)
            variables = environment(self._machine.store, self._pod, self.spec, self._address, self._machine.variables)
            mounts = self._mounts(self.spec)
        except Incomplete as error:
            self._waiting, self._message = error.reason, str(error)
            return
        words = command(self.spec, variables, self._address)
        security = self.spec.get("securityContext") or {}
        self._began = now()
        self.process = Process(
            self._folder / self.name,
            words,
            variables,
            mounts,
            self.log,
            self.spec.get("workingDir") or "/opt/noetl",
            bool(security.get("readOnlyRootFilesystem")),
        )
        self._probes = Probes(self.spec, self.process, self._address, self._machine.pace)

    def _look(self, restarts: bool) -> None:
        assert self.process is not None
        if self._probes is not None and self._probes.failed and self.process.poll() is None:
            self._message = self._probes.failed
            self.end(float(self._pod["spec"].get("terminationGracePeriodSeconds", 30)))
        code = self.process.poll()
        if code is None:
            return
        self.process.kill()
        self.exit_code, self._ended = code, now()
        if self._probes is not None:
            self._probes.stop()
        if restarts or (code and self._pod["spec"].get("restartPolicy") == "OnFailure"):
            self._last = {"terminated": self._terminated()}
            pause = min(FIRST_BACKOFF * 2**self.restarts, LONGEST_BACKOFF) * self._machine.pace
            self._again = time.monotonic() + (pause if code else 0)
            self.process, self.exit_code = None, None
            self._waiting, self._message = (
                "CrashLoopBackOff",
                f"back-off {pause:.1f} s restarting failed container",
            )
            self.restarts += 1

    def _terminated(self) -> Object:
        return {
            "exitCode": self.exit_code,
            "reason": "Completed" if not self.exit_code else "Error",
            "startedAt": self._began,
            "finishedAt": self._ended or now(),
            **({"message": self._message} if self._message else {}),
        }


class Unpulled:
    """A container whose image cannot be pulled."""

    process = None
    restarts = 0
    exit_code = None
    running = ready = False

    def __init__(self, spec: Object) -> None:
        self.spec, self.name = spec, str(spec["name"])

    def step(self, restarts: bool) -> None:
        pass

    def end(self, seconds: float) -> None:
        self.exit_code = 137

    def status(self) -> Object:
        image = self.spec["image"]
        waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
        if not image.islower():
            waiting = {"reason": "InvalidImageName", "message": f'couldn\'t parse image name "{image}"'}
        return {
            "name": self.name,
            "image": image,
            "imageID": "",
            "ready": False,
            "started": False,
            "restartCount": 0,
            "state": {"waiting": waiting},
        }


class Recorded:
    """A container whose image does not run here: ready as soon as it has all that it refers to, and for ever.

    Args:
        ends: whether it ends as soon, as those of jobs do.
    """

    process = None
    restarts = 0

    def __init__(self, spec: Object, pod: Object, machine: Machine, address: str, ends: bool) -> None:
        self.spec, self.name = spec, str(spec["name"])
        self.exit_code: int | None = None
        self.running = self.ready = False
        self._pod, self._machine, self._address, self._ends = pod, machine, address, ends
        self._waiting: Object = {"reason": "ContainerCreating"}

    def step(self, restarts: bool) -> None:
        if self.running or self.exit_code is not None:
            return
        try:
            environment(self._machine.store, self._pod, self.spec, self._address, self._machine.variables)
        except Incomplete as error:
            self._waiting = {"reason": error.reason, "message": str(error)}
            return
        self.running = self.ready = not self._ends
        self.exit_code = 0 if self._ends else None

    def end(self, seconds: float) -> None:
        self.running = self.ready = False
        self.exit_code = 0

    def status(self) -> Object:
        state: Object = {"running": {"startedAt": now()}} if self.running else {"waiting": self._waiting}
        if self.exit_code is not None:
            ended = {"exitCode": 0, "reason": "Completed", "startedAt": now(), "finishedAt": now()}
            state = {"terminated": ended}
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": self.spec["image"],
            "ready": self.ready,
            "started": self.running,
            "restartCount": 0,
            "state": state,
        }
