"""A machine whose PostgreSQL has a standby and whose NATS is a cluster of three, and the faults of both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from noetl_dagster.events.transport.nats import NatsNames
from tests.chaos.machine import Machine
from tests.chaos.nats_cluster import SERVERS, NatsCluster
from tests.chaos.postgres_pair import PostgresPair
from tests.chaos.scene import Fault, Scene


class ClusteredMachine(Machine):
    """A machine on a primary with a synchronous standby and on a cluster of NATS, past the proxies.

    Attributes:
        postgres: the primary and its standby.
        nats: the cluster.
    """

    def __init__(self) -> None:
        super().__init__()
        servers = self.folder / "clusters"
        servers.mkdir(mode=0o711)
        self.folder.chmod(0o711)
        self.postgres = PostgresPair(servers, synchronous=True)
        self.postgres.start("noetl", "dagster")
        self.nats = NatsCluster(servers)
        asyncio.run(self.nats.start())
        places: dict[str, Any] = {
            "db_url": f"{self.postgres.url()}?target_session_attrs=read-write",
            "dagster_db_url": self.postgres.url("dagster"),
            "nats_url": self.nats.urls,
            "nats_replicas": SERVERS,
        }
        self.settings = self.settings.model_copy(update=places)
        self.direct = self.direct.model_copy(update=places)

    def close(self) -> None:
        super().close()
        self.postgres.stop()
        self.nats.stop()

    def heal(self) -> None:
        self.postgres.heal()
        self.nats.heal()
        super().heal()

    def leader(self) -> str:
        """Returns the server that leads the stream of worker events."""
        return asyncio.run(self.nats.leader_of(NatsNames(self.direct).event_stream))


@dataclass(frozen=True, slots=True)
class FailOver:
    """Kills the primary; the standby takes over after a while, and gets a standby of its own."""

    name: str = "fail over"
    part: str = "postgres"
    seconds: tuple[float, float] = (0.0, 1.0)

    def inject(self, scene: Scene) -> bool:
        if not isinstance(scene.machine, ClusteredMachine):
            return False
        scene.machine.postgres.kill_primary()
        return True

    def heal(self, scene: Scene) -> None:
        if isinstance(scene.machine, ClusteredMachine):
            scene.machine.postgres.heal()


@dataclass(frozen=True, slots=True)
class LoseServers:
    """Kills the leader of the cluster of NATS, and perhaps another server with it."""

    count: int
    part: str = "nats"
    seconds: tuple[float, float] = (0.0, 3.0)

    @property
    def name(self) -> str:
        return "kill leader of nats" if self.count == 1 else "kill majority of nats"

    def inject(self, scene: Scene) -> bool:
        machine = scene.machine
        if not isinstance(machine, ClusteredMachine):
            return False
        leader = machine.leader()
        others = [name for name in machine.nats.servers if name != leader]
        for name in [leader, *others][: self.count]:
            machine.nats.kill(name)
        return True

    def heal(self, scene: Scene) -> None:
        if isinstance(scene.machine, ClusteredMachine):
            scene.machine.nats.heal()


CLUSTERED: tuple[Fault, ...] = (FailOver(), LoseServers(1), LoseServers(2))
