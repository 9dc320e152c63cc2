"""Requests of tools to addresses that an installation denies, and redirects that lead elsewhere."""

from __future__ import annotations

import ipaddress
import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from noetl_dagster.errors import CredentialError, ServiceError, ToolError
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access import destinations
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.access.destinations import DenyList, Destinations, RefusedAddressError, is_public
from noetl_dagster.tools.access.keychain import Keychain
from noetl_dagster.tools.base import ToolContext
from tests.serving import served

PUBLIC = "127.0.0.2"
"""Stands for an address of the internet in the tests of redirects."""

ANYTHING = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@dataclass
class Server:
    """A server that notes what it receives, and redirects from ``/<status>?to=<address>``."""

    url: str = ""
    received: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        body = (await request.body()).decode()
        self.received.append((request.method, body, dict(request.headers)))
        path = request.path_params["path"]
        if path.isdigit():
            return Response(status_code=int(path), headers={"location": request.query_params["to"]})
        return PlainTextResponse('{"token": "t"}', media_type="application/json")

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """One at 127.0.0.1, and one at the address that stands for the internet."""
    private, public = Server(), Server()
    with ExitStack() as stack:
        for server, host in ((private, "127.0.0.1"), (public, PUBLIC)):
            app = Starlette(routes=[Route("/{path:path}", server.answer, methods=ANYTHING)])
            server.url = stack.enter_context(served(app, host))
        yield private, public


@pytest.fixture
def private(servers: tuple[Server, Server]) -> Server:
    servers[0].received.clear()
    return servers[0]


@pytest.fixture
def public(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> Server:
    servers[1].received.clear()
    monkeypatch.setattr(destinations, "is_public", lambda address: str(address) == PUBLIC)
    return servers[1]


@pytest.fixture
async def denying(box: ToolContext) -> AsyncIterator[ToolContext]:
    settings = box.settings.model_copy(update={"http_deny": ("127.0.0.0/8", "::1", "denied.example", "*.internal")})
    box.clients = Clients(settings)
    yield box
    await box.clients.close()


DENIED = [
    *("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]"),
    *("0.0.0.0", "[::]", "[::ffff:0.0.0.0]", "0x0", "[::127.0.0.1]", "[2002:7f00:1::]"),
    *("2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0x7f.1"),
    *("denied.example", "DENIED.example.", "a.internal", "a.b.INTERNAL.", "user:pass@127.0.0.1", "127。0。0。1"),
]


async def test_a_denied_address_is_not_reached(denying: ToolContext, run: Any, private: Server) -> None:
    for host in DENIED:
        with pytest.raises(ToolError) as caught:
            await run("http", url=f"http://{host}:{private.port}/x")
        assert not private.received, host
        assert not caught.value.retryable, host
        if "。" not in host:
            assert "NOETL_HTTP_DENY" in str(caught.value) or "is not one of http" in str(caught.value), host


async def test_no_tool_reaches_a_denied_address(
    denying: ToolContext, run: Any, private: Server, pool: asyncpg.Pool, settings: Settings
) -> None:
    refused = "refused by NOETL_HTTP_DENY"
    with pytest.raises(ToolError, match=refused):
        await run("python", script=f"{private.url}/x")
    with pytest.raises(ToolError, match=refused):
        await run("http", url=f"{private.url}/x", method="POST", json={})
    source, target = {"type": "http", "url": f"{private.url}/x"}, {"type": "duckdb", "database": "x.db", "table": "t"}
    with pytest.raises(ToolError, match=refused):
        await run("transfer", source=source, target=target)
    credentials = Credentials(settings, pool, denying.clients)
    auth = {"type": "oauth2", "client_id": "a", "client_secret": "b", "token_url": f"{private.url}/x"}
    with pytest.raises(CredentialError, match=refused):
        await credentials.resolve(auth, CredentialType.BEARER)
    keychain = Keychain(credentials)
    with pytest.raises(CredentialError, match=refused):
        await keychain.open(
            [{"name": "k", "endpoint": f"{private.url}/x"}], Scope(execution_id=1, workload={}, ctx={}, steps={}), None
        )
    assert not private.received


async def test_each_hop_is_checked(run: Any, box: ToolContext, private: Server) -> None:
    box.clients = Clients(box.settings.model_copy(update={"http_deny": ("localhost",)}))
    with pytest.raises(ToolError, match="its host is refused by NOETL_HTTP_DENY"):
        await run("http", url=f"{private.url}/302", params={"to": f"http://localhost:{private.port}/x"})
    assert len(private.received) == 1
    await box.clients.close()


async def test_a_list_that_denies_others(run: Any, box: ToolContext, private: Server) -> None:
    box.clients = Clients(box.settings.model_copy(update={"http_deny": ("10.0.0.0/8", "elsewhere")}))
    for host in ("127.0.0.1", "localhost"):
        assert (await run("http", url=f"http://{host}:{private.port}/x")).data["status_code"] == 200
    await box.clients.close()


@pytest.mark.parametrize("item", ["10.0.0.0/33", "10.0.0/8", "fe80::/200", "2130706433", "0x7f.1", "http://x/"])
def test_malformed_lists_are_refused(item: str) -> None:
    with pytest.raises(ServiceError, match="NOETL_HTTP_DENY: "):
        DenyList.parse([item])


async def test_public_addresses_do_not_redirect_to_private_ones(run: Any, private: Server, public: Server) -> None:
    assert (await run("http", url=f"{private.url}/x")).data["status_code"] == 200  # its connection stays open
    hosts, statuses = ["127.0.0.1", "localhost", "0x7f.1", "[::ffff:127.0.0.1]"], [301, 302, 303, 307, 308]
    for host, status in itertools.product(hosts, statuses):
        with pytest.raises(ToolError, match="a public address redirects to a private one") as caught:
            await run("http", url=f"{public.url}/{status}", params={"to": f"http://{host}:{private.port}/x"})
        assert not caught.value.retryable, (host, status)
    assert (len(private.received), len(public.received)) == (1, len(hosts) * len(statuses))


async def test_nor_in_several_steps_or_for_scripts(run: Any, private: Server, public: Server) -> None:
    to_private = f"{public.url}/302?to={private.url}/x"
    for url in (f"{public.url}/302?to={to_private}", f"{private.url}/302?to={to_private}"):
        with pytest.raises(ToolError, match="a public address redirects to a private one"):
            await run("http", url=url)
    with pytest.raises(ToolError, match="a public address redirects to a private one"):
        await run("python", script=to_private)
    assert len(private.received) == 1


async def test_other_redirects_are_followed(run: Any, private: Server, public: Server) -> None:
    for url, to in ((private.url, public.url), (private.url, "/x"), (public.url, "/x")):
        assert (await run("http", url=f"{url}/302", params={"to": f"{to}/x"})).data["status_code"] == 200


async def test_no_other_origin_receives_a_body(run: Any, private: Server, public: Server) -> None:
    for method, status in itertools.product(ANYTHING, [301, 302, 303, 307, 308]):
        sent = {"headers": {"X-NoETL-Client": "x", "Content-Type": "application/json"}, "method": method}
        if method != "DELETE":
            sent["json"] = {"secret": "s3cr3t"}
        to = {"url": f"{private.url}/{status}", "params": {"to": f"{public.url}/x"}}
        public.received.clear()
        if method != "GET" and (status in (302, 303) or (status == 301 and method == "POST")):
            await run("http", **to, **sent)
            [(got, body, headers)] = public.received
            assert (got, body) == ("GET", ""), (method, status)
            assert not {"x-noetl-client", "content-type"} & headers.keys(), (method, status)
        else:
            with pytest.raises(ToolError, match="another origin, which must not receive the request"):
                await run("http", **to, **sent)
            assert not public.received, (method, status)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((address, True) for address in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")),
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((address, False) for address in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "::", "::1")),
        *((address, False) for address in ("fe80::1", "fd00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1")),
        *((address, False) for address in ("2002:7f00:1::", "::7f00:1", "fec0::1")),
    ],
)
def test_what_is_public(address: str, expected: bool) -> None:
    parsed = ipaddress.ip_address(address)
    assert is_public(parsed) == expected
    info = (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 80))
    reachable = Destinations(DenyList(), public_only=True)
    if expected:
        reachable.connect(info).close()
    else:
        with pytest.raises(RefusedAddressError):
            reachable.connect(info)
