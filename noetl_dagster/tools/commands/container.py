"""``kind: container``: runs a Kubernetes Job and waits for its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.permissions import refusal, refused
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.tools.access.clients import connect_cluster
from noetl_dagster.tools.base import (
    JobMessages,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    pipes_variables,
    time_limit,
)
from noetl_dagster.tools.commands import jobs
from noetl_dagster.tools.commands.cluster import EXCERPT, NO_RIGHT, StartWatch, ask_cluster, delete_job, own_namespace
from noetl_dagster.tools.commands.processes import Output
from noetl_dagster.tools.files import load_script

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
UNANSWERED_SECONDS = 60.0  # for which a job may run while the API server does not answer


class ContainerTool(Tool):
    """Runs an image once.

    Input: ``image``; ``command`` (text for ``/bin/sh -c``, or a list) or ``script``; ``args``; ``env``;
    ``resources`` as Kubernetes writes them; ``namespace`` (default: the pod's own, else the
    kubeconfig's, else ``default``); ``service_account``; ``timeout`` seconds; as Kubernetes writes them too
    ``env_from``, ``volume_mounts``, ``security_context`` (of the container), ``working_dir``, ``image_pull_policy``,
    ``volumes``, ``node_selector``, ``tolerations``, ``image_pull_secrets`` (names will do), ``labels`` and
    ``annotations`` of job and pod. Rights of the host, further privileges, service accounts and Secrets must be allowed
    by ``NOETL_CONTAINER_ALLOW``. Variables whose values contain a secret are passed through a Secret of the job.
    ``pipes: true`` as for shell: messages are objects of the minio store, so the
    job needs a client of that store.

    Output: ``{job, namespace, pod, exit_code, stdout}``; of a long log the last mebibyte. ``stdout`` is None and
    ``pod`` empty if a job succeeded and its pod was deleted before its log was read.

    A call that resumes after its process was killed finds its job by name and uses its outcome. The job is deleted when
    the end of the command is in the log. A cancelled call leaves the job to the process that resumes the command.

    Raises ``ToolError``: without a configured Kubernetes client, for a job that cannot be made or does not start, and
    for an exit code other than 0.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the job and returns its outcome."""
        batch, core = await asyncio.to_thread(connect_cluster, f"container in step {call.step}", NO_RIGHT)
        namespace = str(call.config.get("namespace") or await asyncio.to_thread(own_namespace))
        script = await load_script(call, context)
        async with pipes_variables(call, context, JobMessages.OBJECTS) as variables:
            redact = SECRETS.redact
            secrets = jobs.secret_variables(call, variables, lambda text: redact(text) != text)
            manifest = jobs.job_manifest(call, script, variables, secrets, context.settings)
            _check_rights(call, jobs.job_manifest(call, script, variables, secrets), context)
            job = _ContainerJob(call, batch, core, namespace, secrets)
            context.after(call, job.clear)
            return await self._run(job, context, manifest)

    async def _run(self, job: _ContainerJob, context: ToolContext, manifest: dict[str, Any]) -> ToolResult:
        call = job.call
        try:
            async with time_limit(call):
                await job.make(manifest, context)
                condition = await job.ended(context)
            pod, exit_code, log = await ask_cluster(job.asker, job.outcome)
        except asyncio.CancelledError:
            if call.limit is not None and call.limit.expired():  # else another process may resume the command
                await asyncio.shield(job.stop())
            raise
        except ToolError:
            await asyncio.shield(job.stop())
            raise
        if condition.type == "Complete":
            ended = {"pod": pod, "exit_code": exit_code or 0, "stdout": log}
            return ToolResult(data={"job": job.name, "namespace": job.namespace, **ended})
        where = f"{job.asker}: job {job.name}"
        if condition.reason == "DeadlineExceeded":
            raise ToolError(
                f"{where} took longer than its timeout; without one, NOETL_CONTAINER_DEADLINE_SECONDS applies",
                kind="timeout",
                retryable=True,
            )
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

    def __init__(self, call: ToolCall, batch: Any, core: Any, namespace: str, secrets: Mapping[str, str]) -> None:
        self.call, self.namespace, self.name = call, namespace, jobs.job_name(call)
        self._secrets = secrets
        self.asker = f"container in step {call.step}"
        self._batch, self._core = batch, core
        self._ask, self._delete = partial(ask_cluster, self.asker), partial(delete_job, self.asker, batch)

    async def make(self, manifest: dict[str, Any], context: ToolContext) -> None:
        """Creates the job, or adopts the one that an earlier process created for the same call.

        A job with another definition, because earlier steps had other results, is replaced.

        Raises:
            ToolError: Kubernetes refuses it, a foreign job has its name, or the command has ended.
        """
        await self._refuse_stale(context)
        made_of = manifest["metadata"]["annotations"][jobs.MADE_OF]
        while (created := await self._created(manifest)) is None:
            job = await self._found()
            if job is not None and not self._is_own(job):
                raise ToolError(
                    f"{self.asker}: namespace {self.namespace} has a job {self.name} that is "
                    "not of this call; delete it",
                    kind="client_error",
                )
            if job is not None and job.metadata.deletion_timestamp is None:
                if job.metadata.annotations.get(jobs.MADE_OF) == made_of:
                    await self._make_secret(job)
                    return
                logger.warning("%s: job %s has another definition; it is replaced", self.asker, self.name)
                await self._delete(job)
            await asyncio.sleep(POLL_SECONDS)  # until the deletion is complete
        await self._make_secret(created)

    async def _make_secret(self, job: Any) -> None:
        """Creates the Secret of a job's secret variables, for which its pod waits; an earlier process may have.

        It comes after the job, which owns it: whenever this process is killed, no Secret is left.
        """
        if jobs.SECRET not in job.metadata.annotations or _end_of(job) is not None:
            return
        manifest = jobs.secret_manifest(job, self._secrets)
        try:
            await self._ask(self._core.create_namespaced_secret, self.namespace, manifest)
        except ToolError as error:
            if error.status != 409:
                raise

    async def ended(self, context: ToolContext) -> Any:
        """Waits for the end of the job. Returns its condition ``Complete`` or ``Failed``.

        Raises:
            ToolError: the job is gone, the API does not answer for a minute, or something keeps the job from starting
                for ``NOETL_CONTAINER_START_SECONDS``.
        """
        clock = asyncio.get_running_loop().time
        answered, started = clock(), False
        waiting = StartWatch(f"{self.asker}: job {self.name}", context.settings.container_start_seconds)
        while True:
            try:
                job = await self._ask(self._batch.read_namespaced_job_status, self.name, self.namespace)
                answered = clock()
            except ToolError as error:
                if error.status == 404:
                    message = f"{self.asker}: job {self.name} was deleted before its end was seen"
                    raise ToolError(message, kind="not_found", retryable=True) from None
                if not error.retryable or clock() - answered > UNANSWERED_SECONDS:
                    raise
            else:
                condition = _end_of(job)
                if condition is not None:
                    return condition
                started = started or bool(job.status and job.status.ready)
                problem = None if started else await self._start_problem(waiting)
                context.progress(self.call, f"job {self.name} {'runs' if problem is None else f'waits: {problem}'}")
            await asyncio.sleep(POLL_SECONDS)

    async def _start_problem(self, waiting: StartWatch) -> str | None:
        """Looks whether a problem keeps the job from starting; raises ``ToolError`` if that has lasted too long."""
        try:
            return await waiting.look(self._ask, self._core, self.namespace, self.name)
        except ToolError as error:
            if error.code is not None or not error.retryable:
                raise
            return None  # the API does not answer just now

    def outcome(self, **limits: Any) -> tuple[str, int | None, str | None]:
        """Returns pod, exit code and log of a job that ended; the log is None if it was deleted."""
        from kubernetes.client.exceptions import ApiException

        core, namespace, selector = self._core, self.namespace, f"job-name={self.name}"
        pods = core.list_namespaced_pod(namespace, label_selector=selector, **limits).items
        if not pods:
            return "", None, None
        name, statuses = pods[-1].metadata.name, pods[-1].status.container_statuses or ()
        codes = [one.state.terminated.exit_code for one in statuses if one.state.terminated]
        code = codes[0] if codes else None
        try:
            # as bytes: some versions of the client return the text "b'...'"
            answer = core.read_namespaced_pod_log(name, namespace, _preload_content=False, **limits)
        except ApiException as error:
            if error.status not in (400, 404):  # the container never started, or was deleted
                raise
            return name, code, None
        log = Output()
        log.add(answer.data)
        return name, code, str(log)

    async def stop(self) -> None:
        """Stops the job but keeps it, so that a resumed call does not run it again."""
        body = {"spec": {"activeDeadlineSeconds": 1}}
        with suppress(ToolError):  # it ends by its own deadline, or with its command
            job = await self._found()
            if job is not None and self._is_own(job) and _end_of(job) is None:
                await self._ask(self._batch.patch_namespaced_job, self.name, self.namespace, body)

    async def clear(self) -> None:
        """Deletes every job of the call's command, including those of earlier processes."""
        for job in await self._of_command():
            await self._delete(job)

    async def _refuse_stale(self, context: ToolContext) -> None:
        """Raises ``ToolError`` if the command has ended elsewhere, or if a later call shows that this one failed."""
        names = [job.metadata.annotations[jobs.CALL] for job in await self._of_command()]
        later = jobs.later_number(self.call, names)
        if later is not None and jobs.call_name(self.call) not in names:
            message = f"{self.asker}: this call failed before its process ended; call {later} came after it"
            raise ToolError(message, kind="connection", retryable=True)
        if await context.over(self.call):
            raise ToolError(f"{self.asker}: its command has ended in another process", kind="unknown")

    async def _of_command(self) -> list[Any]:
        """Returns the jobs of the call's command."""
        selector = f"{jobs.OURS}={self.call.execution_id},{jobs.COMMAND}={jobs.command_label(self.call)}"
        listed = await self._ask(self._batch.list_namespaced_job, self.namespace, label_selector=selector)
        return [job for job in listed.items if jobs.CALL in (job.metadata.annotations or {})]

    async def _created(self, manifest: dict[str, Any]) -> Any:
        """Creates and returns the job; None if its name is taken. Waits for a running request even when cancelled."""
        # a misspelled field would be ignored otherwise
        request = self._ask(self._batch.create_namespaced_job, self.namespace, manifest, field_validation="Strict")
        creating = asyncio.ensure_future(request)
        try:
            return await asyncio.shield(creating)
        except ToolError as error:
            if error.status != 409:
                raise
            return None
        except asyncio.CancelledError:
            await asyncio.wait([creating])
            raise

    async def _found(self) -> Any:
        try:
            return await self._ask(self._batch.read_namespaced_job, self.name, self.namespace)
        except ToolError as error:
            if error.status != 404:
                raise
            return None

    def _is_own(self, job: Any) -> bool:
        return bool((job.metadata.annotations or {}).get(jobs.CALL) == jobs.call_name(self.call))


def _check_rights(call: ToolCall, manifest: dict[str, Any], context: ToolContext) -> None:
    """Raises ``ToolError`` if a job asks for rights that the installation does not allow."""
    template, own = manifest["spec"]["template"], manifest["metadata"]["annotations"].get(jobs.SECRET)
    asked = refused(template["spec"], context.settings.container_allow, template["metadata"].get("annotations"))
    rights = [right for right in asked if own is None or right.value != own]
    if rights:
        place = f" ({call.task.place})" if call.task.place is not None else ""
        raise call.error(f"{refusal(rights)}{place}", "auth")


def _end_of(job: Any) -> Any:
    """Returns the condition in which a job ended; None while it runs."""
    for condition in (job.status.conditions if job.status else None) or ():
        if condition.type in ("Complete", "Failed") and condition.status == "True":
            return condition
    return None
