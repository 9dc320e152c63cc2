"""noop, playbook, secrets, artifact, container, and the registry."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from noetl_dagster import extras
from noetl_dagster.errors import NoetlError, ToolError
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult
from noetl_dagster.tools.registry import WORKBOOK, tool_for
from tests.conftest import PROJECT

NOT_IN_TESTS = frozenset({"ducklake", "snowflake", "bigquery"})
"""Extras that need another version of DuckDB, or are large; see their own tests."""


@pytest.mark.parametrize("kind", sorted(TOOL_KINDS.keys() - {WORKBOOK}))
def test_every_kind_has_a_tool(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in NOT_IN_TESTS:
        monkeypatch.setitem(extras.EXTRAS, extra, "duckdb")
    assert tool_for(kind) is tool_for(kind)


def test_unknown_kinds_list_those_that_are() -> None:
    with pytest.raises(NoetlError, match="supported: artifact"):
        tool_for("oracle")
    with pytest.raises(NoetlError, match=r"tool kind 'mcp' is not supported: .* kind http"):
        tool_for("mcp")
    with pytest.raises(NoetlError, match="workbook"):
        tool_for(WORKBOOK)


@pytest.mark.parametrize("kind", [kind for kind, known in TOOL_KINDS.items() if known.extra])
def test_a_kind_whose_extra_is_missing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = TOOL_KINDS[kind].extra
    monkeypatch.setattr(extras, "EXTRAS", {extra: "no_such_package.client"})
    with pytest.raises(ToolError) as caught:
        tool_for.__wrapped__(kind)
    assert str(caught.value) == f"kind {kind} needs the extra {extra}: pip install 'noetl-dagster[{extra}]'"
    assert caught.value.kind == "policy"


def test_every_extra_of_a_kind_exists() -> None:
    offered = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {known.extra for known in TOOL_KINDS.values() if known.extra} <= extras.EXTRAS.keys() <= offered.keys()
    assert all(map(extras.has_extra, extras.EXTRAS.keys() - NOT_IN_TESTS))


async def test_noop(run: Any) -> None:
    assert (await run("noop")).data == {}
    assert (await run("noop", result=[1])).data == [1]


async def test_playbook_goes_to_the_engine(run: Any, box: ToolContext) -> None:
    with pytest.raises(ToolError, match="under the engine"):
        await run("playbook", path="child")

    async def child(call: ToolCall) -> ToolResult:
        return ToolResult(data=call.config["path"])

    box.run_playbook = child
    assert (await run("playbook", path="child")).data == "child"


async def test_secrets_hand_out_handles_only(
    run: Any, box: ToolContext, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "t0k3n-value")
    box.settings = box.settings.model_copy(update={"playbook_env": ("API_*", "MISSING_*")})
    box.credentials = Credentials(box.settings)

    found = await run("secrets", provider="env", secret="API_TOKEN")
    seen = (await run("http", url=server, auth=found.data["handle"])).data["data"]

    assert found.data == {"name": "API_TOKEN", "provider": "env", "handle": "secret://env/API_TOKEN"}
    assert seen["headers"]["authorization"] == "Bearer t0k3n-value"
    with pytest.raises(ToolError, match="is not found by provider 'env'"):
        await run("secrets", secret="MISSING_ONE")


async def test_artifacts_by_reference(run: Any, box: ToolContext) -> None:
    put = await run("artifact", action="put", value={"rows": [1, 2]}, name="numbers", store="pvc")
    for given in ({"ref": put.ref}, {"ref": put.ref.ref}, {"name": "numbers", "step": "stage"}):
        got = await run("artifact", action="get", **given)
        assert await box.results.get(got.ref) == {"rows": [1, 2]}
    assert (await run("artifact", uri=put.ref.physical_uri)).data == {"rows": [1, 2]}

    with pytest.raises(ToolError) as caught:
        await run("resolve", ref="noetl://execution/1/result/a/2")
    assert caught.value.code == "REFERENCE_NOT_AVAILABLE"


async def test_container_needs_a_cluster(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ToolError, match=r"no Kubernetes client is configured; .* runs\.containers"):
        await run("container", image="busybox", command="true")
