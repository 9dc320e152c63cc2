"""Jobs of containers that nobody waits for any more: the process is gone, and its command is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.commands import cluster
from noetl_dagster.tools.commands.jobs import CALL, OURS, command_of

logger = logging.getLogger(__name__)

_ASKER = "jobs of containers"

IsOver = Callable[[int, str], Awaitable[bool]]
"""Whether the log says that nobody runs a command any more, by its execution and name."""


async def remove_orphans(is_over: IsOver, execution_id: int | None = None) -> int:
    """Deletes the jobs of ended commands in the namespace of this process; how many they were.

    Only inside a cluster: elsewhere a kubeconfig may lead anywhere. What cannot be deleted now is there until it
    expires.

    Args:
        execution_id: only this one's.
    """
    if not cluster.NAMESPACE.is_file():
        return 0
    selector = OURS if execution_id is None else f"{OURS}={execution_id}"
    count = 0
    try:
        clients = await asyncio.to_thread(cluster.connect, _ASKER)
        namespace = await asyncio.to_thread(cluster.own_namespace)
        listed = partial(clients.batch.list_namespaced_job, namespace, label_selector=selector)
        for job in (await cluster.asked(_ASKER, listed)).items:
            count += await _removed(clients, job, is_over)
    except ToolError as error:
        logger.info("%s", error)
    return count


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
            raise
        return False
    return True
