"""Who may look at pages, and who may change something: tokens in cookies, and forms of the pages themselves."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from pydantic import SecretStr

from noetl_dagster.service.pages.login import local
from noetl_dagster.settings import Settings
from tests.playbooks import playbook
from tests.service.conftest import Service, serving

TOKENS = {"op": ["operator"], "read": ["reader"], "work": ["pool:default"], "both": ["reader", "operator"]}
FORM = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "same-origin"}


@pytest.fixture
async def guarded(settings: Settings) -> AsyncIterator[Service]:
    async with serving(settings, service_tokens=SecretStr(json.dumps(TOKENS))) as service:
        yield service


def browser(service: Service) -> httpx.AsyncClient:
    """A browser: it keeps cookies, and sends no token by itself."""
    return httpx.AsyncClient(base_url=service.url, timeout=30, headers={"accept": "text/html"}, verify=False)


def form_token(text: str) -> str:
    found = re.search(r'name="form_token" value="([^"]+)"', text)
    assert found is not None
    return found[1]


async def sign_in(client: httpx.AsyncClient, token: str, wanted: str = "/executions") -> httpx.Response:
    page = await client.get("/login", params={"next": wanted})
    fields = {"form_token": form_token(page.text), "next": wanted, "token": token}
    return await client.post("/login", data=fields, headers=FORM)


async def test_signing_in_and_out(guarded: Service) -> None:
    async with browser(guarded) as client:
        refused = await client.get("/executions?playbook=a%26b")
        assert (refused.status_code, refused.headers["location"]) == (
            303,
            "/login?next=/executions%3Fplaybook%3Da%2526b",
        )
        for token, status in (("unknown", 401), ("work", 403), ("", 401)):
            answer = await sign_in(client, token)
            assert (answer.status_code, "noetl_token" in client.cookies) == (status, False), token
        answer = await sign_in(client, "op", "/executions?status=FAILED")
        assert (answer.status_code, answer.headers["location"]) == (303, "/executions?status=FAILED")
        [cookie] = [one for one in answer.headers.get_list("set-cookie") if one.startswith("noetl_token")]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        page = await client.get("/executions")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["cache-control"] == "no-store"
        forged = await client.post("/logout", data={"form_token": "guessed"}, headers=FORM)
        assert "noetl_token" in client.cookies, forged
        await client.post("/logout", data={"form_token": form_token(page.text)}, headers=FORM)
        assert "noetl_token" not in client.cookies
        assert (await client.get("/executions")).status_code == 303
        # the cookie is for pages: programs send the token in a header
        await sign_in(client, "op")
        assert (await client.get("/api/executions", headers={"x-noetl-client": "t"})).status_code == 401
        as_bearer = await client.get("/executions", headers={"authorization": "Bearer read"})
        assert as_bearer.status_code == 200


async def test_cookies_of_other_services_of_the_host_do_not_matter(guarded: Service) -> None:
    async with browser(guarded) as client:
        for other in ('ui={"a": [1, 2]}', "a b=c", 'x="', "[x]=1", "path=/", "=", "caf\xe9=\xff"):
            cookie = f"{other}; noetl_token=read".encode("latin-1")
            answer = await client.get("/executions", headers={"cookie": cookie})
            assert answer.status_code == 200, other


@pytest.mark.parametrize("token", ["read", "work", None])
async def test_who_may_not_operate_changes_nothing(guarded: Service, token: str | None) -> None:
    engine = guarded.plane.engine
    execution = await engine.lifecycle.create(playbook("workflow: [{step: start, tool: {kind: noop}}]"))
    here = f"/executions/{execution.id}"
    async with browser(guarded) as client:
        client.cookies.set("noetl_form", "known")
        if token is not None:
            client.cookies.set("noetl_token", token)
        if token == "read":
            page = await client.get(here)
            assert page.status_code == 200
            assert "data-dialog" not in page.text
        for change in ("cancel", "resume"):
            answer = await client.post(f"{here}/{change}", data={"form_token": "known"}, headers=FORM)
            assert answer.status_code == (401 if token is None else 403), change
    assert (await engine.runtime.state(execution.id)).status == "RUNNING"


FORGED = {
    "no field": ({}, {}, 403),
    "another field": ({"form_token": "guessed"}, {}, 403),
    "another site": ({"form_token": "known"}, {"sec-fetch-site": "cross-site"}, 403),
    "another port of this machine": ({"form_token": "known"}, {"sec-fetch-site": "same-site"}, 403),
    "another origin": ({"form_token": "known"}, {"origin": "http://evil.test"}, 403),
    "a form with files": ({"form_token": "known"}, {"content-type": "multipart/form-data; boundary=x"}, 415),
    "JSON": ({"form_token": "known"}, {"content-type": "application/json"}, 415),
    "a large form": ({"form_token": "known", "reason": "x" * 100_000}, {}, 413),
    "many fields": ({"form_token": "known", **{f"f{n}": "" for n in range(200)}}, {}, 422),
    "the page's own": ({"form_token": "known", "reason": "too slow"}, {}, 303),
}


async def test_only_forms_of_the_pages_change_something(service: Service) -> None:
    engine = service.plane.engine
    execution = await engine.lifecycle.create(playbook("workflow: [{step: start, tool: {kind: noop}}]"))
    async with browser(service) as client:
        client.cookies.set("noetl_form", "known")
        for name, (fields, headers, status) in FORGED.items():
            answer = await client.post(f"/executions/{execution.id}/cancel", data=fields, headers=FORM | headers)
            assert answer.status_code == status, name
            state = await engine.runtime.state(execution.id)
            assert state.status == ("CANCELLED" if status == 303 else "RUNNING"), name
        client.cookies.clear()
        answer = await client.post(f"/executions/{execution.id}/cancel", data={"form_token": ""}, headers=FORM)
        assert answer.status_code == 403
    assert state.error == "too slow"


async def test_another_host_name_is_refused_where_there_are_no_tokens(service: Service) -> None:
    async with browser(service) as client:
        assert (await client.get("/executions", headers={"host": "evil.test"})).status_code == 400


@pytest.mark.parametrize(
    "address", ["//evil.test", "https://evil.test", "/\\evil.test", "javascript:alert(1)", "/a\r\nb: c", ""]
)
def test_signing_in_leads_to_no_other_site(address: str) -> None:
    assert local(address) == "/executions"
    assert local("/executions/1?at=2") == "/executions/1?at=2"
