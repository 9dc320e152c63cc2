"""The faults: each has a name, hits a machine that drives a flow, and is healed after a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.chaos.clusters import CLUSTERED
from tests.chaos.disks import SIZES
from tests.chaos.disturbances import DISTURBANCES
from tests.chaos.scene import Fault, Scene

PIDS: dict[str, Callable[[Scene], int | None]] = {
    "driver": lambda scene: scene.driver(),
    "helper": lambda scene: _child(scene, "noetl_dagster.engine.helper"),
    "jvm": lambda scene: _child(scene, "org.apache.spark.deploy.SparkSubmit"),
    **{
        name: lambda scene, name=name: scene.machine.process(name)  # type: ignore[misc]
        for name in (
            "worker over nats",
            "worker over http",
            "ingestor",
            "api",
            "postgres",
            "nats",
            "object_store",
        )
    },
}


def _child(scene: Scene, word: str) -> int | None:
    """A process below the driver whose command line has a word, and that has no such child."""
    driver = scene.driver()
    if driver is None:
        return None
    try:
        found = [
            one.pid
            for one in psutil.Process(driver).children(recursive=True)
            if any(word in argument for argument in one.cmdline())
        ]
    except psutil.NoSuchProcess:
        return None
    return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Kill:
    """Ends a process with SIGKILL; servers and services are started again."""

    part: str
    seconds: tuple[float, float] = (0.0, 0.5)

    @property
    def name(self) -> str:
        return f"kill {self.part}"

    def inject(self, scene: Scene) -> bool:
        pid = PIDS[self.part](scene)
        if pid is not None:
            scene.machine.kill(pid)
        return pid is not None

    def heal(self, scene: Scene) -> None:
        scene.machine.start_servers()


@dataclass(frozen=True, slots=True)
class Stop:
    """Stops a process with its children past its leases and heartbeats, and wakes it."""

    part: str
    seconds: tuple[float, float] = (0.5, 5.0)

    @property
    def name(self) -> str:
        return f"stop {self.part}"

    def inject(self, scene: Scene) -> bool:
        pid = PIDS[self.part](scene)
        if pid is not None:
            scene.machine.stop(pid)
        return pid is not None

    def heal(self, scene: Scene) -> None:
        scene.machine.wake()


@dataclass(frozen=True, slots=True)
class Clock:
    """Moves the clock of a process by an hour. Healing it is a jump too."""

    part: str
    moved: int
    seconds: tuple[float, float] = (0.5, 2.5)

    @property
    def name(self) -> str:
        return f"clock of {self.part} {'ahead' if self.moved > 0 else 'behind'}"

    def inject(self, scene: Scene) -> bool:
        return scene.machine.clocks.move(self.part, self.moved)

    def heal(self, scene: Scene) -> None:
        scene.machine.clocks.set_right()


@dataclass(frozen=True, slots=True)
class FullDisk:
    """Leaves no byte on the disk of a part."""

    part: str
    seconds: tuple[float, float] = (0.3, 2.0)

    @property
    def name(self) -> str:
        return f"full disk of {self.part}"

    def inject(self, scene: Scene) -> bool:
        return scene.machine.disks.fill(self.part)

    def heal(self, scene: Scene) -> None:
        scene.machine.disks.free()
        if self.part == "nats" and (pid := scene.machine.process(self.part)) is not None:
            scene.machine.kill(pid)  # it has stopped JetStream, until it is restarted
        scene.machine.start_servers()


HOUR = 3600
CLOCKS = ("driver", "worker over nats", "worker over http", "ingestor", "api")

FAULTS: tuple[Fault, ...] = (
    *(Kill(part) for part in PIDS),
    *(Stop(part) for part in PIDS),
    *DISTURBANCES,
    *(Clock(part, moved) for part in CLOCKS for moved in (HOUR, -HOUR)),
    *(FullDisk(part) for part in SIZES),
)
ON_CLUSTERS: tuple[Fault, ...] = (
    *CLUSTERED,
    *(Kill(part) for part in ("driver", "worker over nats", "worker over http", "object_store")),
    *(Stop(part) for part in ("driver", "worker over nats")),
)
"""Those of a clustered machine: others would hit servers that it does not use."""

BY_NAME = {fault.name: fault for fault in (*FAULTS, *CLUSTERED)}
