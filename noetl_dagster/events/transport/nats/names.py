"""Names of streams, subjects and consumers. With the default namespace they are exactly the seeds'."""

from __future__ import annotations

import re
from dataclasses import dataclass

from noetl_dagster.settings import DEFAULT_POOL, Settings

_NO_TOKEN = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Names:
    """NATS names of one installation.

    Attributes:
        event_stream: ``NOETL_WORKER_EVENTS``; ``event_prefix``: ``noetl.events``.
        command_stream: ``NOETL_COMMANDS``; ``commands``: the broadcast subject ``noetl.commands``.
        capacity: prefix of the workers' capacity reports, ``noetl.workers``.
        wake: subject on which all workers of the default pool are told that commands wait, ``noetl.wake``.
        ingest_consumer: durable consumer that all ingestors share.
        broadcast_consumer: durable consumer that all workers share.
    """

    event_stream: str
    event_prefix: str
    command_stream: str
    commands: str
    capacity: str
    wake: str
    ingest_consumer: str = "server-worker-events"
    broadcast_consumer: str = "workers"

    @classmethod
    def of(cls, settings: Settings) -> Names:
        namespace = settings.nats_namespace
        return cls(
            event_stream=f"{namespace.upper()}_WORKER_EVENTS",
            event_prefix=settings.event_nats_subject_prefix,
            command_stream=f"{namespace.upper()}_COMMANDS",
            commands=f"{namespace}.commands",
            capacity=f"{namespace}.workers",
            wake=f"{namespace}.wake",
        )

    def event_subject(self, execution_id: int, event_type: str) -> str:
        """``noetl.events.<execution id>.<event type>``."""
        return f"{self.event_prefix}.{execution_id}.{event_type}"

    def wake_all(self, pool: str) -> str:
        """The subject on which all workers of a pool are told, ``noetl.wake`` or ``noetl.wake.pool.<pool>``."""
        return self.wake if pool == DEFAULT_POOL else f"{self.wake}.pool.{pool}"

    def wake_of(self, worker_id: str) -> str:
        """The subject on which one worker is told, ``noetl.wake.<worker id>``."""
        return f"{self.wake}.{subject_token(worker_id)}"

    def targeted(self, worker_id: str) -> str:
        """The subject of one worker's own commands, ``noetl.commands.<worker id>``."""
        return f"{self.commands}.{subject_token(worker_id)}"

    def capacity_of(self, worker_id: str) -> str:
        return f"{self.capacity}.{subject_token(worker_id)}"


def subject_token(name: str) -> str:
    """A name as one token of a subject: dots of host names and the like become hyphens."""
    return _NO_TOKEN.sub("-", name) or "-"
