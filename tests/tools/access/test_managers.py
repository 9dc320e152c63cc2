"""Secrets of AWS, Google and Kubernetes, each asked through its own protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import asyncpg
import boto3
import grpc
import pytest
import yaml
from google.cloud import secretmanager_v1
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.access.managers import asking
from tests.playbooks import text_of
from tests.serving import served
from tests.tools.access.aws_server import aws_served

pytestmark = pytest.mark.long

PASSWORD = "correct-horse-battery"
DATABASE = json.dumps({"user": "etl", "password": PASSWORD, "port": 5432})


class Counted:
    """How often a server was asked, and what it is to answer with next."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.status = 200


# -- AWS ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def account() -> Iterator[tuple[str, str]]:
    """An account with a secret, a plain one, binary ones and parameters; gives its address and the secret's ARN."""
    with aws_served() as url:
        yield url, _filled(url)


@pytest.fixture
def aws(account: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment of the account; gives the secret's ARN."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hush"}
    for name, value in {"AWS_ENDPOINT_URL": account[0], "AWS_REGION": "eu-west-1", **keys}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return account[1]


def _filled(url: str) -> str:
    session = boto3.Session("key", "hush", region_name="eu-west-1")  # the default one would keep these keys
    secrets = session.client("secretsmanager", endpoint_url=url)
    arn = secrets.create_secret(Name="prod/db", SecretString=DATABASE)["ARN"]
    secrets.create_secret(Name="prod/token", SecretString="plain-token")
    secrets.create_secret(Name="prod/text", SecretBinary=b"text-in-bytes")
    secrets.create_secret(Name="prod/binary", SecretBinary=b"\xff\xfe")
    parameters = session.client("ssm", endpoint_url=url)
    parameters.put_parameter(Name="/prod/api/key", Value="parameter-value", Type="SecureString")
    parameters.put_parameter(Name="db", Value=DATABASE, Type="SecureString")
    return arn


async def test_an_arn_says_its_region(settings: Settings, aws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert await Credentials(settings).reveal(f"secret://aws/{aws}#password") == PASSWORD


async def test_an_aws_environment_that_is_not_complete(
    settings: Settings, aws: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(CredentialError, match="no AWS region; set AWS_DEFAULT_REGION"):
        await Credentials(settings).reveal("secret://aws/prod/db")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(CredentialError, match=r"'prod/db'.*ProfileNotFound.*nobody"):
        await Credentials(settings).reveal("secret://aws/prod/db")
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CredentialError, match="no AWS credentials; set AWS_ACCESS_KEY_ID"):
        await Credentials(settings).reveal("secret://aws/prod/db")


@pytest.mark.parametrize(
    ("code", "status", "message", "retryable"),
    [
        ("AccessDeniedException", 400, "may not be read; allow secretsmanager:GetSecretValue", False),
        ("ExpiredTokenException", 400, "does not accept the credentials .ExpiredTokenException.; renew", False),
        ("ThrottlingException", 400, "AWS refuses with ThrottlingException", True),
        ("InternalServiceError", 500, "AWS refuses with InternalServiceError", True),
    ],
)
async def test_refusals_of_aws(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, code: str, status: int, message: str, retryable: bool
) -> None:
    async def answer(request: Request) -> Response:
        return JSONResponse({"__type": code, "message": "as asked"}, status)

    with served(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        with pytest.raises(CredentialError, match=message) as caught:
            await Credentials(settings).reveal("secret://aws/prod/db")
    assert caught.value.retryable is retryable


async def test_a_manager_out_of_reach_may_be_tried_again(run: Any, aws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ToolError, match=r"'prod/db'.*AWS cannot be reached") as caught:
        await run("secrets", provider="aws", secret="prod/db")
    assert caught.value.kind == "credential"
    assert caught.value.retryable


async def test_the_tool_hands_out_handles_that_others_open(run: Any, aws: str, server: str) -> None:
    found = await run("secrets", provider="aws", secret="prod/db", key="password")
    assert found.data == {
        "name": "prod/db#password",
        "provider": "aws",
        "handle": "secret://aws/prod/db#password",
    }
    seen = (await run("http", url=server, auth=found.data["handle"])).data["data"]
    assert seen["headers"]["authorization"] == f"Bearer {PASSWORD}"
    assert (await run("secrets", provider="ssm", name="db", key="user")).data["handle"] == "secret://aws_ssm/db#user"


# -- Google ------------------------------------------------------------------------------------------


class GoogleServer(Counted):
    """The method of ``SecretManagerService`` that reads, in its own messages over gRPC."""

    SECRETS: ClassVar = {
        "projects/lake/secrets/db/versions/latest": DATABASE.encode(),
        "projects/lake/secrets/db/versions/1": b"first",
        "projects/other/secrets/token/versions/latest": b"token-of-other",
        "projects/lake/secrets/binary/versions/latest": b"\xff\xfe",
    }
    refuses: grpc.StatusCode | None = None

    def __init__(self) -> None:
        super().__init__()
        self.held = threading.Event()
        self.held.set()

    def access(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.asked.append(request.name)
        self.held.wait(30)
        if self.refuses is not None:
            context.abort(self.refuses, "as asked")
        if request.name not in self.SECRETS:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Secret [{request.name}] not found")
        payload = {"data": self.SECRETS[request.name]}
        return secretmanager_v1.AccessSecretVersionResponse(name=request.name, payload=payload)


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GoogleServer, str]]:
    made = GoogleServer()
    method = grpc.unary_unary_rpc_method_handler(
        made.access,
        request_deserializer=secretmanager_v1.AccessSecretVersionRequest.deserialize,
        response_serializer=secretmanager_v1.AccessSecretVersionResponse.serialize,
    )
    service = grpc.method_handlers_generic_handler(
        "google.cloud.secretmanager.v1.SecretManagerService", {"AccessSecretVersion": method}
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "lake")
    yield made, f"http://127.0.0.1:{port}"
    made.held.set()
    server.stop(None)


def of_google(settings: Settings, google: tuple[GoogleServer, str]) -> Credentials:
    return Credentials(settings.model_copy(update={"google_secrets_endpoint": google[1]}))


async def test_a_google_environment_that_is_not_complete(
    settings: Settings, google: tuple[GoogleServer, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT")
    with pytest.raises(CredentialError, match="no project; set GOOGLE_CLOUD_PROJECT"):
        await of_google(settings, google).reveal("secret://google/db")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(CredentialError, match="no Google credentials; set GOOGLE_APPLICATION_CREDENTIALS"):
        await Credentials(settings).reveal("secret://google/db")


# -- Kubernetes --------------------------------------------------------------------------------------


class Cluster(Counted):
    """The path of the Kubernetes API that reads a secret, for who has the token."""

    token = "of-the-cluster"
    DATA: ClassVar = {"password": PASSWORD.encode(), "certificate": b"\xff\xfe"}

    async def read(self, request: Request) -> Response:
        place = "{namespace}/{name}".format(**request.path_params)
        self.asked.append(place)
        status = 401 if request.headers.get("authorization") != f"Bearer {self.token}" else self.status
        if status == 200 and place != "etl/db":
            status = 404
        if status != 200:
            failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            return JSONResponse(failure, status)
        data = {key: base64.b64encode(value).decode() for key, value in self.DATA.items()}
        metadata = {"name": "db", "namespace": "etl"}
        return JSONResponse({"kind": "Secret", "apiVersion": "v1", "metadata": metadata, "data": data})


def kubeconfig(server: str, token: str) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": server}}],
            "users": [{"name": "me", "user": {"token": token}}],
        }
    )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster()
    path = "/api/v1/namespaces/{namespace}/secrets/{name}"
    with served(Starlette(routes=[Route(path, made.read)])) as url:
        file = tmp_path / "kubeconfig"
        file.write_text(kubeconfig(url, "of-the-cluster"))
        # the client reads the variable once, when it is loaded
        from kubernetes.config import kube_config

        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        yield made


async def test_no_cluster(
    settings: Settings, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubernetes.config import kube_config

    cluster.token = "of-another"
    with pytest.raises(CredentialError, match="does not accept the credentials"):
        await Credentials(settings).reveal("secret://kubernetes/etl/db#password")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(CredentialError, match="set KUBECONFIG, or run inside a cluster"):
        await Credentials(settings).reveal("secret://kubernetes/etl/db#password")


# -- all of them -------------------------------------------------------------------------------------


@pytest.fixture
def managed(request: pytest.FixtureRequest, settings: Settings) -> Callable[[str, Any], Credentials]:
    """Credentials over the server of a handle's provider, which refuses if it is told to."""

    def over(handle: str, refuses: Any = None) -> Credentials:
        provider = handle.split("/")[2]
        if provider in ("google", "gcp"):
            google: tuple[GoogleServer, str] = request.getfixturevalue("google")
            google[0].refuses = refuses
            return of_google(settings, google)
        if provider in ("kubernetes", "k8s"):
            request.getfixturevalue("cluster").status = refuses or 200
        else:
            request.getfixturevalue("aws")
        return Credentials(settings)

    return over


@pytest.mark.parametrize(
    ("handle", "value"),
    [
        ("secret://aws/prod/db#password", PASSWORD),
        ("secret://aws/prod/db#port", "5432"),
        ("secret://aws/prod/db", DATABASE),
        ("secret://aws_secrets_manager/prod/token", "plain-token"),
        ("secret://aws/prod/text", "text-in-bytes"),
        ("secret://aws_ssm//prod/api/key", "parameter-value"),
        ("secret://ssm/db#user", "etl"),
        ("secret://google/db#password", PASSWORD),
        ("secret://gcp/db/versions/1", "first"),
        ("secret://google/projects/other/secrets/token", "token-of-other"),
        ("secret://google/projects/lake/secrets/db/versions/latest#user", "etl"),
        ("secret://kubernetes/etl/db#password", PASSWORD),
        ("secret://k8s/etl/db#password", PASSWORD),
    ],
)
async def test_secrets(managed: Callable[..., Credentials], handle: str, value: str) -> None:
    assert await managed(handle).reveal(handle) == value


@pytest.mark.parametrize(
    ("handle", "refuses", "message"),
    [
        ("aws/prod/none", None, "'prod/none' of provider 'aws' is not found; create it"),
        ("aws_ssm//none", None, "'/none' of provider 'aws_ssm' is not found; create it"),
        ("aws/prod/db#pin", None, "'prod/db' of provider 'aws' has no key 'pin'; it has password, port, user"),
        ("aws/prod/token#pin", None, "'prod/token' of provider 'aws' is no JSON object, so it has no key 'pin'"),
        ("aws/prod/binary", None, "'prod/binary' of provider 'aws' is binary"),
        ("google/none", None, "'none' of provider 'google' is not found; create it"),
        ("google/a/b", None, "write <secret> or projects/<project>/secrets/<secret>"),
        ("google/binary", None, "is binary"),
        ("google/db", grpc.StatusCode.PERMISSION_DENIED, "may not be read; grant roles/secretmanager.secretAcc"),
        ("google/db", grpc.StatusCode.FAILED_PRECONDITION, "disabled or destroyed"),
        ("google/db", grpc.StatusCode.INVALID_ARGUMENT, "Google refuses with InvalidArgument"),
        ("google/db", grpc.StatusCode.RESOURCE_EXHAUSTED, "Google does not answer .ResourceExhausted."),
        ("kubernetes/etl/none#password", None, "'etl/none' of provider 'kubernetes' is not found"),
        ("kubernetes/etl/db#pin", None, "has no key 'pin'; it has password"),
        ("kubernetes/etl/db", None, "has several values; name one of them with 'key': password"),
        ("kubernetes/db#password", None, "write <namespace>/<secret>"),
        ("kubernetes/etl/db#password", 403, "may not be read; allow 'get' on secrets of etl"),
        ("kubernetes/etl/db#password", 503, "Kubernetes answers 503"),
    ],
)
async def test_what_they_do_not_give(
    managed: Callable[..., Credentials], handle: str, refuses: Any, message: str
) -> None:
    with pytest.raises(CredentialError, match=message) as caught:
        await managed(f"secret://{handle}", refuses).reveal(f"secret://{handle}")
    assert PASSWORD not in str(caught.value)
    assert "plain-token" not in str(caught.value)
    assert caught.value.retryable is (refuses in (grpc.StatusCode.RESOURCE_EXHAUSTED, 503))


async def test_who_wants_the_same_secret_at_once_asks_once(
    settings: Settings, google: tuple[GoogleServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = of_google(settings, google)
    handles = ["secret://google/db#user", "secret://google/db#password"] * 500
    found = await asyncio.gather(*map(credentials.reveal, handles))
    assert found == ["etl", PASSWORD] * 500
    assert len(google[0].asked) == 1
    monkeypatch.setattr(asking, "KEPT_SECONDS", 0.0)
    for _ in range(2):
        await credentials.reveal("secret://google/projects/other/secrets/token")
    assert len(google[0].asked) == 3


async def test_one_who_stops_waiting_leaves_the_answer_to_the_others(
    settings: Settings, google: tuple[GoogleServer, str]
) -> None:
    google[0].held.clear()
    credentials = of_google(settings, google)
    handle = "secret://google/db#password"
    impatient = asyncio.create_task(credentials.reveal(handle))
    patient = asyncio.create_task(credentials.reveal(handle))
    await asyncio.sleep(0)
    impatient.cancel()
    google[0].held.set()
    assert await patient == PASSWORD
    assert impatient.cancelled()
    assert len(google[0].asked) == 1


async def test_a_manager_that_never_answers_is_given_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, google: tuple[GoogleServer, str]
) -> None:
    google[0].held.clear()
    monkeypatch.setattr(asking, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(CredentialError, match="'db': provider 'google' does not answer within") as caught:
        await of_google(settings, google).reveal("secret://google/db")
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("handle", "package", "remedy"),
    [
        ("secret://google/db", "google.cloud", r"install 'noetl-dagster\[google\]'"),
        ("secret://kubernetes/etl/db", "kubernetes", r"install 'noetl-dagster\[k8s\]'"),
        ("secret://aws/db", "dagster_aws.secretsmanager", "install dagster-aws"),
    ],
)
async def test_a_package_that_is_missing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, handle: str, package: str, remedy: str
) -> None:
    manager = f"{asking.__package__}.{handle.split('/')[2]}"
    monkeypatch.delitem(sys.modules, manager, raising=False)
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CredentialError, match=remedy):
        await Credentials(settings).reveal(handle)


PLAYBOOK = text_of(
    "managed",
    """
    workload: {api: "http://localhost"}
    keychain:
      - {name: db, kind: secret_manager, provider: aws, map: {password: "prod/db#password", key: prod/token}}
    workflow:
      - step: find
        tool: {kind: secrets, provider: aws_ssm, secret: /prod/api/key}
        next: [ask]
      - step: ask
        loop: {in: "{{ range(20) | list }}", iterator: n, spec: {mode: parallel}}
        tool:
          kind: http
          url: "{{ api }}/x"
          auth: "{{ find.handle }}"
          headers: {X-Password: "{{ keychain.db.password }}"}
          output: {right: "{{ output.data.data.headers['x-password'] | length }}"}
    """,
)


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    opened = await Engine.open(settings)
    yield opened
    await opened.close()


async def test_a_playbook_leaves_no_trace_of_them(
    engine: Engine, settings: Settings, pool: asyncpg.Pool[Any], aws: str, server: str
) -> None:
    outcome = await engine.run(parse_playbook(PLAYBOOK), {"api": server})
    assert outcome.status is ExecutionStatus.COMPLETED
    written = str(await pool.fetch("SELECT * FROM noetl.event")) + str(
        await pool.fetch("SELECT * FROM noetl.result_ref")
    )
    assert "secret://aws_ssm//prod/api/key" in written
    for value in (PASSWORD, "parameter-value", "plain-token"):
        assert value not in written
