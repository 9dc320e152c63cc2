"""Jobs of containers that nobody waits for any more: the process is gone, and its command is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.commands import cluster
from noetl_dagster.tools.commands.jobs import CALL, OURS, command_of

logger = logging.getLogger(__name__)

_ASKER = "jobs of containers"

AT_ONCE = 100
"""Executions that one listing is about."""

IsOver = Callable[[int, str], Awaitable[bool]]
"""Whether the log says that nobody runs a command any more, by its execution and name."""


async def remove_orphans(is_over: IsOver, executions: Collection[int] | None = None) -> int:
    """Deletes the jobs of ended commands in the namespace of this process; how many they were.

    Only inside a cluster: elsewhere a kubeconfig may lead anywhere. What cannot be deleted now is there until it
    expires.

    Args:
        executions: only of these.
    """
    if not cluster.NAMESPACE.is_file():
        return 0
    count = 0
    try:
        clients = await asyncio.to_thread(cluster.connect, _ASKER)
        namespace = await asyncio.to_thread(cluster.own_namespace)
        for selector in _selectors(executions):
            listed = partial(clients.batch.list_namespaced_job, namespace, label_selector=selector)
            for job in (await cluster.asked(_ASKER, listed)).items:
                count += await _removed(clients, job, is_over)
    except ToolError as error:
        logger.warning("%s", error)
    return count


def _selectors(executions: Collection[int] | None) -> Iterator[str]:
    if executions is None:
        yield OURS
        return
    ids = sorted(executions)
    for start in range(0, len(ids), AT_ONCE):
        yield f"{OURS} in ({','.join(map(str, ids[start : start + AT_ONCE]))})"


async def _removed(clients: cluster.Cluster, job: Any, is_over: IsOver) -> bool:
    command = command_of((job.metadata.annotations or {}).get(CALL, ""))
    if command is None or not await is_over(*command):
        return False
    options = {"propagationPolicy": "Background", "preconditions": {"uid": job.metadata.uid}}
    delete = clients.batch.delete_namespaced_job
    try:
        await cluster.asked(_ASKER, partial(delete, job.metadata.name, job.metadata.namespace, body=options))
    except ToolError as error:
        if error.status not in (404, 409):
            logger.warning("%s", error)
        return False
    return True
