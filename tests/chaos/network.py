"""The ways between processes and servers: each goes through a proxy, which faults disturb."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tests.proxy import UNDISTURBED, Proxy, Traffic

T = TypeVar("T")

WAYS = {
    "postgres": ("postgres", "dagster_db"),
    "nats": ("nats",),
    "api": ("api",),
    "object_store": ("object_store",),
}
"""The proxies before each part."""


class Network:
    """Proxies in a thread of their own, by the name of what they lead to."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxies: dict[str, Proxy] = {}
        self._work: dict[str, Future[None]] = {}

    def lead_to(self, name: str, url: str) -> str:
        """Returns the address of a proxy before ``url``."""
        there = urlsplit(url)
        proxy = self._proxies[name] = Proxy(there.hostname, there.port)
        self._run(proxy.open())
        assert there.port is not None
        return url.replace(f":{there.port}", f":{proxy.port}", 1)

    def disturb(self, name: str, traffic: Traffic) -> None:
        self._now(self._proxies[name].change, traffic)

    def heal(self, *names: str) -> None:
        """Ends the disturbances of some ways, by default all, and all work."""
        for name in names or self._proxies:
            self._now(self._proxies[name].change, UNDISTURBED)
        for work in () if names else tuple(self._work):
            self.cancel(work)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine in the thread; it ends with :meth:`cancel`."""
        self.cancel(name)
        self._work[name] = asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel(self, name: str) -> None:
        if (work := self._work.pop(name, None)) is not None:
            work.cancel()

    def close(self) -> None:
        self.heal()
        for proxy in self._proxies.values():
            self._now(proxy.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _now(self, call: Any, *arguments: Any) -> None:
        async def called() -> None:
            call(*arguments)

        self._run(called())
