"""Services: addresses that lead to ready pods, and the names of them."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

from tests.kubernetes.cluster.store import Object, Store

DOMAIN = "cluster.local"
LATE_SECONDS = 1.0
"""How long nodes still send connections to a pod that leaves: until they have heard of it."""

Target = tuple[str, int]


class Services:
    """Forwards connections from the address of each service to one of its ready pods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._turn = 0
        self._left: dict[str, float] = {}
        self._taking: dict[str, Object] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Listens at the addresses that there are now."""
        wanted = {
            (service["spec"]["clusterIP"], port["port"]): (service["metadata"], port["port"])
            for service in self._store.list("Service")
            for port in service["spec"].get("ports") or ()
            if service["spec"].get("clusterIP") not in (None, "None", "")
        }
        for place in self._servers.keys() - wanted.keys():
            server = self._servers.pop(place)
            self._loop.call_soon_threadsafe(server.close)
        for place in wanted.keys() - self._servers.keys():
            metadata, port = wanted[place]
            self._servers[place] = asyncio.run_coroutine_threadsafe(
                self._serve(place, metadata["namespace"], metadata["name"], port), self._loop
            ).result()

    def hosts(self, namespace: str) -> str:
        """Lines of ``/etc/hosts`` for the pods of a namespace."""
        lines = []
        for service in self._store.list("Service"):
            name, own = service["metadata"]["name"], service["metadata"]["namespace"]
            address = service["spec"].get("clusterIP")
            if address in (None, "", "None"):
                targets = self._targets(service, 0)
                address = targets[0][0] if targets else None
            if address is None:
                continue
            names = [f"{name}.{own}", f"{name}.{own}.svc", f"{name}.{own}.svc.{DOMAIN}"]
            lines.append(" ".join([address, *([name] if own == namespace else []), *names]))
        return "".join(f"{line}\n" for line in lines)

    def close(self) -> None:
        async def ended() -> None:
            for server in self._servers.values():
                server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, place: tuple[str, int], namespace: str, name: str, port: int) -> asyncio.Server:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, asyncio.CancelledError):
                await self._forward(namespace, name, port, reader, writer)
            writer.close()

        return await asyncio.start_server(connected, *place)

    async def _forward(
        self,
        namespace: str,
        name: str,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        service = self._store.get("Service", namespace, name)
        targets = self._targets(service, port) if service else []
        if not targets:
            return  # nobody is ready: the connection ends
        self._turn += 1
        inner_reader, inner_writer = await asyncio.open_connection(*targets[self._turn % len(targets)])
        try:
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
        finally:
            inner_writer.close()

    def _targets(self, service: Object, port: int) -> list[Target]:
        """Where connections to a port may go."""
        selector = service["spec"].get("selector")
        if not selector:
            return []
        entry = next((one for one in service["spec"].get("ports") or () if one["port"] == port), {})
        found: list[Target] = []
        unready = service["spec"].get("publishNotReadyAddresses", False)
        namespace = service["metadata"]["namespace"]
        there = {pod["metadata"]["uid"]: pod for pod in self._store.list("Pod", namespace)}
        gone = {uid: pod for uid, pod in self._taking.items() if pod["metadata"]["namespace"] == namespace}
        for uid, pod in (gone | there).items():
            labels = pod["metadata"].get("labels") or {}
            if not all(labels.get(key) == value for key, value in selector.items()):
                continue
            if not (self._takes(pod, uid in there) or (unready and (pod.get("status") or {}).get("podIP"))):
                continue
            number = _port(pod, entry.get("targetPort", port))
            recorded = not any("containerID" in one for one in pod["status"].get("containerStatuses") or ())
            if not recorded:
                found.append((pod["status"]["podIP"], number))
        return found

    def _takes(self, pod: Object, there: bool) -> bool:
        """Whether a pod is sent connections: it is ready, or nodes have not heard yet that it leaves or has gone."""
        uid, status = pod["metadata"]["uid"], pod.get("status") or {}
        if there and "deletionTimestamp" not in pod["metadata"]:
            takes = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
        else:
            left = self._left.setdefault(uid, time.monotonic())
            takes = time.monotonic() - left < LATE_SECONDS and "podIP" in status
        if takes:
            self._taking[uid] = pod
        else:
            self._taking.pop(uid, None)
        return takes


def _port(pod: Object, port: Any) -> int:
    for container in pod["spec"]["containers"]:
        for entry in container.get("ports") or ():
            if entry.get("name") == port:
                return int(entry["containerPort"])
    return int(port)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
