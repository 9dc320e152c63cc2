"""As much of a cluster as runs and steps in pods need: jobs that are processes of this machine.

It speaks the part of Kubernetes' API that ``dagster-k8s`` asks for jobs and pods, and gives a container's process the
environment that its pod names, and no other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.forked import Forked, run
from tests.serving import served

PROJECT = Path(__file__).parents[2]
INHERITED = ("PATH", "HOME", "LANG", "JAVA_HOME", "TMPDIR")

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{{name: here, cluster: {{server: "{url}"}}}}]
contexts: [{{name: here, context: {{cluster: here, user: me, namespace: default}}}}]
users: [{{name: me, user: {{token: none}}}}]
"""


@dataclass
class Pod:
    """A job's only pod."""

    job: dict[str, Any]
    process: Forked
    output: Path

    @property
    def container(self) -> dict[str, Any]:
        return dict(self.job["spec"]["template"]["spec"]["containers"][0])

    def end(self, how: signal.Signals) -> None:
        """Signals the container's processes, all of them."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)


@dataclass
class Cluster:
    """The jobs of a test.

    Attributes:
        secrets: names and values by the name of the secret.
    """

    folder: Path
    kubeconfig: Path
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)

    def pods_of(self, prefix: str) -> list[Pod]:
        return [pod for name, pod in self.pods.items() if name.startswith(prefix)]

    def said(self) -> str:
        return "\n".join(f"{name}: {pod.output.read_text()[-3000:]}" for name, pod in self.pods.items())

    async def create(self, request: Request) -> JSONResponse:
        return self._start(await request.json())

    def _start(self, job: dict[str, Any]) -> JSONResponse:
        name = job["metadata"]["name"]
        if name in self.pods:
            return JSONResponse({"kind": "Status", "code": 409, "reason": "AlreadyExists"}, 409)
        container = job["spec"]["template"]["spec"]["containers"][0]
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment["PYTHONPATH"] = str(PROJECT)
        for source in container.get("envFrom", []):
            environment |= self.secrets.get(source.get("secretRef", {}).get("name"), {})
        environment |= {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
        command = [*container.get("command", []), *container["args"]]
        assert command[0] == "dagster"
        output = self.folder / f"{name}.log"
        process = Forked(*command, environment=environment, folder=PROJECT, output=output)
        self.pods[name] = Pod(job, process, output)
        return JSONResponse(job, 201)

    async def read(self, request: Request) -> JSONResponse:
        pod = self.pods.get(request.path_params["name"])
        if pod is None or request.path_params["name"] in self.deleted:
            return JSONResponse({"kind": "Status", "code": 404, "reason": "NotFound"}, 404)
        code = pod.process.poll()
        status = {"active": 1} if code is None else {"succeeded": 1} if code == 0 else {"failed": 1}
        return JSONResponse({**pod.job, "status": status})

    async def delete(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if name in self.pods and name not in self.deleted:  # a job and its pod: the container is told once
            self.deleted.append(name)
            self.pods[name].end(signal.SIGTERM)
        return JSONResponse({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    async def list_pods(self, request: Request) -> JSONResponse:
        _, _, job = request.query_params["labelSelector"].partition("=")
        items = [{"metadata": {"name": job}}] if job in self.pods else []
        return JSONResponse({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})


@contextmanager
def jobs_api(folder: Path) -> Iterator[Cluster]:
    """Serves until the block ends, and with it every process."""
    cluster = Cluster(folder, folder / "kubeconfig")
    # the first fork waits for imports, which on a busy machine take longer than a client waits for an answer
    run("-c", "pass", environment=os.environ, folder=folder, texts=folder)
    batch, core = "/apis/batch/v1/namespaces/{namespace}/jobs", "/api/v1/namespaces/{namespace}/pods"
    application = Starlette(
        routes=[
            Route(batch, cluster.create, methods=["POST"]),
            Route(batch + "/{name}/status", cluster.read),
            Route(batch + "/{name}", cluster.delete, methods=["DELETE"]),
            Route(core, cluster.list_pods),
            Route(core + "/{name}", cluster.delete, methods=["DELETE"]),
        ]
    )
    with served(application) as url:
        cluster.kubeconfig.write_text(KUBECONFIG.format(url=url))
        try:
            yield cluster
        finally:
            for pod in cluster.pods.values():
                pod.process.kill()
