"""The catalog over HTTP: playbooks are registered, listed, and run by their version."""

from __future__ import annotations

from pathlib import Path

from noetl_dagster.settings import Settings
from tests.playbooks import text_of
from tests.service.conftest import Service, serving
from tests.service.test_api import ended_execution


def text(name: str, said: str) -> str:
    code = f"tool: {{kind: python, code: \"result = '{said}'\"}}"
    return text_of(name, f"\nworkflow:\n  - step: start\n    {code}\n")


async def test_registering_listing_and_versions(service: Service) -> None:
    client = service.client
    first = await client.post("/api/catalog", json={"content": text("one", "a")})
    assert first.status_code == 201
    assert first.json()["new"] is True
    assert first.json()["version"]["version"] == 1
    again = await client.post("/api/catalog", json={"content": text("one", "a")})
    assert (again.status_code, again.json()["new"]) == (200, False)
    assert again.json()["version"] == first.json()["version"]
    for content in (text("one", "b"), text("two", "a")):
        assert (await client.post("/api/catalog", json={"content": content})).status_code == 201

    listed = (await client.get("/api/catalog", params={"limit": 1})).json()["playbooks"]
    assert [(one["path"], one["version"]) for one in listed] == [("tests/one", 2)]
    rest = (await client.get("/api/catalog", params={"after": "tests/one"})).json()["playbooks"]
    assert [one["path"] for one in rest] == ["tests/two"]

    found = (await client.get("/api/catalog/tests/one")).json()
    assert found["path"] == "tests/one"
    assert [one["version"] for one in found["versions"]] == [2, 1]
    assert {one["content"] for one in found["versions"]} == {None}
    [one] = (await client.get("/api/catalog/tests/one@1")).json()["versions"]
    assert one["content"] == text("one", "a")
    assert (await client.get("/api/catalog/tests/one", params={"after": 2})).json()["versions"] == []
    assert (await client.get("/api/catalog/tests/none")).status_code == 404
    assert (await client.get("/api/catalog/tests/one@3")).status_code == 404

    # what workers ask has a number
    source = (await client.get(f"/api/catalog/{one['catalog_id']}")).json()
    assert source.pop("model") is not None
    assert source == {
        "catalog_id": one["catalog_id"], "path": "tests/one", "source": text("one", "a"),
    }  # fmt: skip


async def test_a_broken_playbook_is_refused_with_its_problems(service: Service) -> None:
    broken = text("one", "a").replace("kind: python", "kind: pyhton")

    answer = await service.client.post("/api/catalog", json={"content": broken})

    assert answer.status_code == 422
    assert "pyhton" in answer.json()["detail"]
    assert (await service.client.get("/api/catalog")).json() == {"playbooks": []}


async def test_an_execution_of_a_version(service: Service) -> None:
    client = service.client
    for said in ("a", "b"):
        await client.post("/api/catalog", json={"content": text("one", said)})

    launched = await client.post("/api/executions/execute", json={"path": "tests/one@1"})
    assert launched.status_code == 202, launched.text
    found = await ended_execution(client, launched.json()["execution_id"])
    assert found["status"] == "COMPLETED", found
    assert (found["path"], found["version"]) == ("tests/one", 1)
    assert found["steps"][0]["data"] == "a"
    missing = await client.post("/api/executions/execute", json={"path": "tests/one@3"})
    assert missing.status_code == 404
    assert "tests/one@3" in missing.json()["detail"]


async def test_a_lenient_registration_is_kept_and_executions_show_its_warnings(
    settings: Settings, tmp_path: Path
) -> None:
    content = text("one", "a").replace("kind: python", "kind: python, cods: b")
    (tmp_path / "two.yaml").write_text(content.replace("one", "two"))
    async with serving(settings, playbooks_path=tmp_path) as service:
        client = service.client
        strict = await client.post("/api/catalog", json={"content": content})
        assert (strict.status_code, "has no field 'cods'" in strict.text) == (422, True)
        lenient = await client.post("/api/catalog", json={"content": content, "lenient": True})
        [warning] = lenient.json()["warnings"]
        assert warning == "line 7: step 'start': python has no field 'cods'; did you mean 'code'?"
        assert lenient.json()["version"]["meta"]["lenient"] is True
        refused = await client.post("/api/executions/execute", json={"path": "tests/two"})
        assert (refused.status_code, "has no field 'cods'" in refused.text) == (422, True)
        for request in ({"path": "tests/one"}, {"path": "tests/two", "lenient": True}):
            launched = await client.post("/api/executions/execute", json=request)
            assert launched.status_code == 202, launched.text
            found = await ended_execution(client, launched.json()["execution_id"])
            assert (found["status"], found["warnings"]) == ("COMPLETED", [warning]), found
