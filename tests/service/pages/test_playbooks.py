"""The pages of playbooks: the list, one with its graph, executions, versions and text; and two executions compared."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.service.pages.playbooks import LINES, ShownText
from noetl_dagster.settings import Settings
from tests.playbooks import text_of
from tests.service.conftest import Service, serving
from tests.service.pages.hostile import HOSTILE
from tests.service.pages.html import page_at

TWO = """
workload: {{said: {said}}}
workflow:
  - step: start
    tool: {{kind: noop}}
    next: [{{step: last}}]
  - step: last
    tool: {{kind: python, code: "if said == 'no': raise ValueError('<script>no</script>')", input: {{said: "{{{{ said }}}}"}}}}
"""
BROKEN = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: broken, path: tests/broken}\nworkflow: <script>\n"


def text(name: str, said: str = "fine") -> str:
    return text_of(name, TWO.format(said=said))


@pytest.fixture
async def service(settings: Settings, tmp_path: Path) -> AsyncIterator[Service]:
    folder = tmp_path / "playbooks"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "one.yaml").write_text(text("in-folder"))
    (folder / "broken.yaml").write_text(BROKEN)
    async with serving(settings, playbooks_path=folder) as running:
        yield running


async def made(service: Service, name: str = "in-folder", **workload: Any) -> int:
    shape = parse_playbook(text(name), file=f"{name}.yaml")
    return (await service.plane.engine.run(shape, workload)).execution_id


async def registered(service: Service, *texts: str) -> None:
    for one in texts:
        answer = await service.client.post("/api/catalog", json={"content": one})
        assert answer.status_code in (200, 201), answer.text


async def test_the_list_has_registered_playbooks_and_files(service: Service) -> None:
    await registered(service, text("b"), text("b", "maybe"), text("in-folder"))
    found = await page_at(service.client, "/playbooks")
    shown = [link for link in found.links if link.startswith("/playbooks/")]
    assert shown == [
        "/playbooks/tests/b",
        "/playbooks/tests/b@2",
        "/playbooks/tests/broken",
        "/playbooks/tests/in-folder",
        "/playbooks/tests/in-folder@1",
    ]
    assert "deep/one.yaml" in found.text
    rest = await page_at(service.client, "/playbooks?after=tests/c")
    assert "/playbooks/tests/b" not in rest.links
    assert "No further playbook" in (await page_at(service.client, "/playbooks?after=tests/zzz")).text


async def test_a_playbook_of_the_folder_with_its_executions(service: Service) -> None:
    executions = [await made(service), await made(service, said="no")]
    found = await page_at(service.client, "/playbooks/tests/in-folder")
    assert "file deep/one.yaml" in found.text
    assert {"#L6", "#L9", "#L1"} <= set(found.links)
    lines = [place for place in found.ids if place.startswith("L")]
    assert lines == [f"L{number}" for number in range(1, len(text("in-folder").split("\n")) + 1)]
    for execution in executions:
        assert found.links.count(f"/executions/{execution}") == 1
    assert found.cells[7:].index("failed") < found.cells[7:].index("completed")


async def test_versions(service: Service) -> None:
    await registered(service, text("b", "old"), text("b", "new"))
    for version, said in (("", "new"), ("@latest", "new"), ("@1", "old"), ("@2", "new")):
        found = await page_at(service.client, f"/playbooks/tests/b{version}")
        assert f"workload: {{said: {said}}}" in found.text
        assert {"/playbooks/tests/b@1", "/playbooks/tests/b@2"} <= set(found.links)


async def test_the_text_that_an_execution_ran_stays(service: Service) -> None:
    execution = await made(service, "from-a-file")
    found = await page_at(service.client, f"/playbooks/tests/from-a-file?execution={execution}")
    assert "text that ran from a file" in found.text
    assert "/executions/" + str(execution) in found.links
    assert "text that ran from a file" in (await page_at(service.client, "/playbooks/tests/from-a-file")).text


async def test_what_there_is_not(service: Service) -> None:
    for address in (
        "/playbooks/tests/none",
        "/playbooks/tests/in-folder@7",
        "/playbooks/..%2F..%2Fetc%2Fpasswd",
        "/playbooks/nul%00",
        "/playbooks/tests/in-folder?execution=1",
        "/playbooks/tests/in-folder?execution=x",
        "/compare?left=1&right=2",
    ):
        await page_at(service.client, address, 404)


def test_a_long_text_is_numbered_quickly() -> None:
    before = time.process_time()
    lines, more = ShownText("p", "o", f"{HOSTILE[0]}\r\n{'x' * 100}\u2028" * LINES).numbered()
    assert time.process_time() - before < 5
    assert (lines.count("<li"), more) == (LINES, LINES + 1)
    assert lines.startswith(
        '<li id="L1"><a class="at" tabindex="-1" href="#L1" aria-label="Line 1">1</a><code>&lt;script'
    )
    assert "\r" not in lines
    assert len(ShownText("p", "o", "x" * 1_000_000).numbered()[0]) < 20_000


async def test_a_broken_playbook_is_shown_with_its_problems(service: Service) -> None:
    found = await page_at(service.client, "/playbooks/tests/broken")
    assert "workflow: <script>" in found.text
    assert "tests/broken" in found.text
    assert "broken.yaml:4" in found.text


async def test_hostile_playbooks_are_only_text(service: Service) -> None:
    for number, said in enumerate(HOSTILE):
        shape = parse_playbook(text("in-folder"), file="x.yaml")
        named = shape.model_copy(
            update={
                "source": said.replace("\x00", "") * 3,
                "metadata": shape.metadata.model_copy(update={"path": f"h/{number}"}),
            }
        )
        state = await service.plane.engine.run(
            named, {"said": "no", said.replace("\x00", ""): [said.replace("\x00", "")]}
        )
        found = await page_at(service.client, f"/playbooks/h/{number}?execution={state.execution_id}")
        assert "\u202e" not in found.text
        await page_at(service.client, f"/compare?left={state.execution_id}&right={state.execution_id}")
    await page_at(service.client, f"/compare?left={state.execution_id}&right={state.execution_id - 1}", 404)
    for said in HOSTILE:
        assert (await service.client.get("/compare", params={"left": said, "right": "1"})).status_code in (200, 422)
        assert (await service.client.get("/playbooks", params={"after": said[:3_000]})).status_code == 200


async def test_two_executions_side_by_side(service: Service) -> None:
    left, right = await made(service), await made(service, said="no")
    found = await page_at(service.client, f"/compare?left={left}&right={right}")
    assert "Step last completed in the left execution, and failed (" in found.text
    assert "<script>no</script>" in found.text
    place = found.cells.index("said")
    assert found.cells[place : place + 3] == ["said", '"fine"', '"no"']
    assert {"start", "last differs"} <= set(found.cells)
    assert f"/executions/{right}/steps/last" in found.links
    assert "/playbooks/tests/in-folder" in found.links
    swapped = await page_at(service.client, f"/compare?left={right}&right={left}")
    assert "Step last failed (" in swapped.text
    assert "The workloads are alike." in (await page_at(service.client, f"/compare?left={left}&right={left}")).text


async def test_one_alone_is_compared_with_the_one_before_it(service: Service) -> None:
    first, other, last = await made(service), await made(service, "another"), await made(service, said="no")
    found = await page_at(service.client, f"/compare?right={last}")
    assert f"/executions/{first}" in found.links
    assert f"/executions/{other}" not in found.links
    assert "difference" not in (await page_at(service.client, f"/compare?right={first}")).ids


async def test_the_form_asks_for_executions(service: Service) -> None:
    assert "Compare" in (await page_at(service.client, "/compare")).text
    found = await page_at(service.client, "/compare?left=one&right=2", 422)
    assert "'one' is no execution id" in found.text
