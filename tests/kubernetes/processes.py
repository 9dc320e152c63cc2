"""The containers of rendered manifests as processes of this machine: command, environment, files and probes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from noetl_dagster.settings import Settings
from tests.helm.chart import Manifest, Pods, component, of_kind
from tests.kubernetes.cluster.kubelet.probes import serves
from tests.processes import StartProcess
from tests.waiting import PATIENCE_SECONDS

SERVICE = "trial-noetl-dagster-"
PLAYBOOKS = "/opt/noetl/playbooks"


class Machine:
    """Runs containers; each component has its own folders and free ports in the place of those of its pod.

    Args:
        objects: the rendered manifests.
        secrets: values by the names of variables.
    """

    def __init__(self, objects: list[Manifest], secrets: Mapping[str, str], folder: Path, start: StartProcess) -> None:
        self.objects = objects
        self._secrets = secrets
        self._folder = folder
        self._start = start
        self._ports: dict[tuple[str, int], int] = {}

    def port(self, name: str, number: int) -> int:
        """The free port that stands for one of a component."""
        if (name, number) not in self._ports:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                self._ports[name, number] = taken.getsockname()[1]
        return self._ports[name, number]

    def log(self, name: str) -> str:
        path = self._folder / name / "log"
        return path.read_text() if path.exists() else ""

    def start(self, name: str) -> subprocess.Popen[Any]:
        """Starts the container of a component, as often as one likes."""
        pods = component(self.objects, name)
        arguments = [*pods.container.get("command", []), *pods.container["args"]]
        environment = self._environment(pods)
        with (self._folder / name / "log").open("a") as output:
            command = [self._here(name, one) for one in arguments]
            return self._start(command, env=environment, stdout=output, cwd=self._folder / name)

    def probe(self, name: str, kind: str) -> bool:
        """Carries out ``readiness`` or ``liveness``."""
        pods = component(self.objects, name)
        probe = pods.container[f"{kind}Probe"]
        if "exec" in probe:
            command = [self._here(name, one) for one in probe["exec"]["command"]]
            done = subprocess.run(
                command,
                env=self._environment(pods),
                capture_output=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
            return done.returncode == 0
        if "grpc" in probe:
            place = f"127.0.0.1:{self.port(name, probe['grpc']['port'])}"
            return serves(place, probe["grpc"], PATIENCE_SECONDS)
        asked = probe["httpGet"]
        [number] = [one["containerPort"] for one in pods.container["ports"] if one["name"] == asked["port"]]
        url = f"http://127.0.0.1:{self.port(name, number)}{asked['path']}"
        try:
            return httpx.get(url, timeout=PATIENCE_SECONDS, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def _environment(self, pods: Pods) -> dict[str, str]:
        name = pods.component
        found = pods.variables(self.objects)
        for one in pods.container["env"]:
            source = one.get("valueFrom", {}).get("secretKeyRef")
            if source is not None and (source["key"] in self._secrets or not source.get("optional")):
                found[one["name"]] = self._secrets[source["key"]]
        self._make_folders(pods)
        system = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(self._folder)}
        system |= {key: os.environ[key] for key in ("PYTHONPATH", "JAVA_HOME") if key in os.environ}
        return system | {key: self._here(name, value) for key, value in found.items()}

    def _make_folders(self, pods: Pods) -> None:
        """The volumes of a pod, ConfigMaps with their contents."""
        maps = of_kind(self.objects, "ConfigMap")
        volumes = {one["name"]: one for one in pods.spec["volumes"]}
        for mount in pods.container["volumeMounts"]:
            folder = self._place(pods.component, mount["mountPath"])
            folder.mkdir(parents=True, exist_ok=True)
            source = volumes[mount["name"]].get("configMap")
            if source is not None:
                for key, text in maps[source["name"]]["data"].items():
                    (folder / key).write_text(self._here(pods.component, text))

    def _place(self, name: str, path: str) -> Path:
        return self._folder / name / path.strip("/").replace("/", "-")

    def _here(self, name: str, text: str) -> str:
        """A text of the manifests with the paths, addresses and ports of this machine."""
        pods = component(self.objects, name)
        for other in ("api", "code-location"):
            for number in (8700, 4000):
                text = text.replace(f"{SERVICE}{other}:{number}", f"127.0.0.1:{self.port(other, number)}")
        text = text.replace(f"{SERVICE}code-location", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
        if "grpc_server" in text:
            text = text.replace("4000", str(self.port("code-location", 4000)))
        for mount in sorted(pods.container["volumeMounts"], key=lambda one: -len(one["mountPath"])):
            if mount["mountPath"] != "/tmp":
                text = text.replace(mount["mountPath"], str(self._place(name, mount["mountPath"])))
        text = text.replace(PLAYBOOKS, str(self._folder))
        numbers = [one["containerPort"] for one in pods.container.get("ports", ())]
        return str(self.port(name, int(text))) if text.isdecimal() and int(text) in numbers else text


def values_for(settings: Settings) -> dict[str, Any]:
    """Values of the chart that lead to the services of a test."""
    return {
        "secrets": {"name": "noetl"},
        "storage": {
            "tier": "minio",
            "minio": {"endpoint": settings.minio_endpoint, "bucket": settings.minio_bucket},
        },
        "settings": {
            "NOETL_NATS_NAMESPACE": settings.nats_namespace,
            "NOETL_EVENT_NATS_SUBJECT_PREFIX": settings.event_nats_subject_prefix,
            "NOETL_WORKER_HEARTBEAT_SECONDS": "0.5",  # whoever is killed is noticed soon
        },
        "workers": {"pools": {"default": {}, "gpu": {"slots": 2}}},
    }


def secrets_for(settings: Settings) -> dict[str, str]:
    return {
        "NOETL_DB_URL": str(settings.db_url),
        "NOETL_DAGSTER_DB_URL": str(settings.dagster_db_url),
        "NOETL_NATS_URL": str(settings.nats_url),
        "NOETL_MINIO_ACCESS_KEY": settings.minio_access_key,
        "NOETL_MINIO_SECRET_KEY": settings.minio_secret_key.get_secret_value(),
        "NOETL_SERVICE_TOKENS": '{"token": ["pool:default", "pool:gpu", "operator", "reader"]}',
        "NOETL_SERVER_TOKEN": "token",
    }
