"""``kind: container``: a Kubernetes Job, watched to its end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import JobMessages, Tool, Toolbox, ToolCall, ToolResult, time_limit
from noetl_dagster.tools.commands.cluster import EXCERPT, Cluster, asked, connect, own_namespace
from noetl_dagster.tools.commands.jobs import (
    CALL,
    COMMAND,
    MADE_OF,
    OURS,
    call_name,
    command_label,
    job_manifest,
    job_name,
    later_number,
)
from noetl_dagster.tools.commands.pipes import pipes_variables
from noetl_dagster.tools.scripts import load_script

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
LOG_BYTES = 1_048_576
UNANSWERED_SECONDS = 60.0
"""A job is left to itself so long while the API server does not answer."""


class ContainerTool(Tool):
    """Runs an image once.

    Input: ``image``; ``command`` (text for ``/bin/sh -c``, or a list) or ``script``; ``args``; ``env``;
    ``resources`` as Kubernetes writes them; ``namespace`` (default: the pod's own, else the
    kubeconfig's, else ``default``); ``service_account``; ``timeout`` seconds; as Kubernetes writes them too
    ``env_from``, ``volume_mounts``, ``security_context`` (of the container), ``working_dir``, ``image_pull_policy``,
    ``volumes``, ``node_selector``, ``tolerations``, ``image_pull_secrets`` (names will do), ``labels`` and
    ``annotations`` of job and pod. ``pipes: true`` as for shell: the messages come by objects of the minio store, to
    which the job needs a client of its own.

    Output: ``{job, namespace, pod, exit_code, stdout}``; of a long log the last mebibyte. ``stdout`` is None, and
    ``pod`` empty, of a job that succeeded and whose pod was gone before its log was read.

    A call that begins again after its process was killed finds its job by its name, and takes what that came or comes
    to. The job is deleted when the end of the command is in the log; at the call's end where nobody keeps a log. A
    call that is cancelled leaves it to whoever goes on with the command.

    Raises ``ToolError``: without a configured Kubernetes client, for a job that cannot
    be made, and for an exit code other than 0.
    """

    kind = "container"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        cluster = await asyncio.to_thread(connect, _asker(call))
        namespace = str(call.config.get("namespace") or await asyncio.to_thread(own_namespace))
        script = await load_script(call, box)
        async with pipes_variables(call, box, JobMessages.OBJECTS) as variables:
            manifest = job_manifest(call, script, variables)
            job = _ContainerJob(call, cluster, namespace)
            if box.after is not None and call.command_id:
                box.after(call, job.clear)
                return await self._run(job, box, manifest)
            try:
                return await self._run(job, box, manifest)
            finally:
                await asyncio.shield(job.remove())

    async def _run(self, job: _ContainerJob, box: Toolbox, manifest: dict[str, Any]) -> ToolResult:
        call = job.call
        try:
            async with time_limit(call):
                await job.make(manifest, box)
                condition = await job.ended(box)
            pod, exit_code, log = await asked(job.asker, job.outcome)
        except asyncio.CancelledError:
            if call.limit is not None and call.limit.expired():  # else the command may go on elsewhere
                await asyncio.shield(job.stop())
            raise
        except ToolError:
            await asyncio.shield(job.stop())
            raise
        log = None if log is None else box.credentials.redact(log)
        if condition.type == "Complete":
            code = 0 if exit_code is None else exit_code
            data = {
                "job": job.name,
                "namespace": job.namespace,
                "pod": pod,
                "exit_code": code,
                "stdout": log,
            }
            return ToolResult(data=data)
        where = f"{job.asker}: job {job.name}"
        if condition.reason == "DeadlineExceeded":
            raise ToolError(f"{where} took longer than its timeout", kind="timeout", retryable=True)
        if exit_code is None:
            why = f"{condition.reason}: {condition.message}" if condition.message else condition.reason
            raise ToolError(f"{where} failed without an exit code of its container: {why}", kind="unknown")
        raise ToolError(
            f"{where} ended with exit code {exit_code}: {(log or '').strip()[-EXCERPT:]}",
            kind="unknown",
            code=exit_code,
        )


class _ContainerJob:
    """The job of a call in the cluster."""

    def __init__(self, call: ToolCall, cluster: Cluster, namespace: str) -> None:
        self.call, self.namespace, self.name = call, namespace, job_name(call)
        self.asker = _asker(call)
        self._batch, self._core = cluster.batch, cluster.core

    async def make(self, manifest: dict[str, Any], box: Toolbox) -> None:
        """Creates the job; one that an earlier process made for the same call stands for it.

        One that was made of other words, because what comes before the call gave something else this time, is replaced.

        Raises:
            ToolError: Kubernetes refuses it, another's has its name, or nobody is to make it any more.
        """
        await self._refuse_stale(box)
        made_of = manifest["metadata"]["annotations"][MADE_OF]
        while not await self._created(manifest):
            found = await self._found()
            if found is not None and not self._is_own(found):
                raise ToolError(
                    f"{self.asker}: namespace {self.namespace} has a job {self.name} that is "
                    "not of this call; delete it",
                    kind="client_error",
                )
            if found is not None and found.metadata.deletion_timestamp is None:
                if found.metadata.annotations.get(MADE_OF) == made_of:
                    return
                logger.warning("%s: job %s was made of other words; it is made anew", self.asker, self.name)
                await self._delete(found)
            await asyncio.sleep(POLL_SECONDS)  # until what is being deleted is gone

    async def ended(self, box: Toolbox) -> Any:
        """Waits for the end of the job: its condition ``Complete`` or ``Failed``."""
        clock = asyncio.get_running_loop().time
        answered = clock()
        while True:
            try:
                job = await asked(
                    self.asker, self._batch.read_namespaced_job_status, self.name, self.namespace
                )
                answered = clock()
            except ToolError as error:
                if error.status == 404:
                    raise ToolError(
                        f"{self.asker}: job {self.name} was deleted before its end was seen",
                        kind="not_found",
                        retryable=True,
                    ) from None
                if not error.retryable or clock() - answered > UNANSWERED_SECONDS:
                    raise
            else:
                condition = _end_of(job)
                if condition is not None:
                    return condition
                box.progress(self.call, f"job {self.name} runs")
            await asyncio.sleep(POLL_SECONDS)

    def outcome(self, **limits: Any) -> tuple[str, int | None, str | None]:
        """Pod, exit code and log of a job that ended; the log is None where there is none any more."""
        from kubernetes.client.exceptions import ApiException

        selector = f"job-name={self.name}"
        pods = self._core.list_namespaced_pod(self.namespace, label_selector=selector, **limits).items
        if not pods:
            return "", None, None
        pod = pods[-1]
        states = [one.state.terminated for one in pod.status.container_statuses or () if one.state.terminated]
        code = states[0].exit_code if states else None
        try:
            # as bytes: clients of some versions take the text for one and give "b'...'"
            answer = self._core.read_namespaced_pod_log(
                pod.metadata.name, self.namespace, _preload_content=False, **limits
            )
        except ApiException as error:
            if error.status not in (400, 404):  # it never began, or is gone
                raise
            return pod.metadata.name, code, None
        return pod.metadata.name, code, answer.data[-LOG_BYTES:].decode(errors="replace")

    async def stop(self) -> None:
        """Ends what runs of the job. It stays, so that who begins the call again does not run it again."""
        body = {"spec": {"activeDeadlineSeconds": 1}}
        with suppress(ToolError):  # it ends by its own deadline, or with its command
            found = await self._found()
            if found is not None and self._is_own(found) and _end_of(found) is None:
                await asked(self.asker, self._batch.patch_namespaced_job, self.name, self.namespace, body)

    async def remove(self) -> None:
        """Deletes the job with its pod; no other's, and it may be gone.

        Raises:
            ToolError: Kubernetes refuses it or is away.
        """
        found = await self._found()
        if found is not None and self._is_own(found):
            await self._delete(found)

    async def clear(self) -> None:
        """Deletes every job of the call's command, those of earlier processes too.

        Raises:
            ToolError: as :meth:`remove`.
        """
        for found in await self._of_command():
            await self._delete(found)

    async def _refuse_stale(self, box: Toolbox) -> None:
        """Nobody waits for a call whose command has ended elsewhere; a later one says that this one had failed."""
        names = [job.metadata.annotations[CALL] for job in await self._of_command()]
        if call_name(self.call) not in names:
            later = later_number(self.call, names)
            if later is not None:
                raise ToolError(
                    f"{self.asker}: this call failed before its process ended; call {later} came after it",
                    kind="connection",
                    retryable=True,
                )
        if box.over is not None and self.call.command_id and await box.over(self.call):
            raise ToolError(f"{self.asker}: its command has ended in another process", kind="unknown")

    async def _of_command(self) -> list[Any]:
        """The jobs of the call's command."""
        selector = f"{OURS}={self.call.execution_id},{COMMAND}={command_label(self.call)}"
        listed = partial(self._batch.list_namespaced_job, self.namespace, label_selector=selector)
        jobs = (await asked(self.asker, listed)).items
        return [job for job in jobs if CALL in (job.metadata.annotations or {})]

    async def _delete(self, found: Any) -> None:
        options = {"propagationPolicy": "Background", "preconditions": {"uid": found.metadata.uid}}
        name = found.metadata.name
        delete = partial(self._batch.delete_namespaced_job, name, self.namespace, body=options)
        try:
            await asked(self.asker, delete)
        except ToolError as error:
            if error.status not in (404, 409):
                raise

    async def _created(self, manifest: dict[str, Any]) -> bool:
        """False: there is one of its name. A request that is under way is waited for in every case."""
        creating = asyncio.ensure_future(
            asked(self.asker, self._batch.create_namespaced_job, self.namespace, manifest)
        )
        try:
            await asyncio.shield(creating)
        except ToolError as error:
            if error.status != 409:
                raise
            return False
        except asyncio.CancelledError:
            await asyncio.wait([creating])
            raise
        return True

    async def _found(self) -> Any:
        try:
            return await asked(self.asker, self._batch.read_namespaced_job, self.name, self.namespace)
        except ToolError as error:
            if error.status != 404:
                raise
            return None

    def _is_own(self, job: Any) -> bool:
        return bool((job.metadata.annotations or {}).get(CALL) == call_name(self.call))


def _asker(call: ToolCall) -> str:
    return f"container in step {call.step}"


def _end_of(job: Any) -> Any:
    """The condition in which a job ended; None while it runs."""
    for condition in (job.status.conditions if job.status else None) or ():
        if condition.type in ("Complete", "Failed") and condition.status == "True":
            return condition
    return None
