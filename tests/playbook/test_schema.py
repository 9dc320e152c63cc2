"""The schema for editors follows the tables and agrees with the loader on what ships."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from noetl_dagster.cli.commands.check import schema
from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.loader import load_playbook, parse_report
from noetl_dagster.playbook.schema import language_schema
from noetl_dagster.playbook.tool_kinds import API_VERSION, KIND, TOOL_KINDS
from tests.playbook.playbooks import errors_of

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
SCHEMA = language_schema()


STEP = "- step: start\n  tool: {kind: noop}\n"


def read_keys(steps: str, root: str = "") -> set[str]:
    """Returns the keys that the loader reads beside one that it does not know."""
    [error] = errors_of(steps, root=root)
    return set(error.partition("known keys: ")[2].split(", "))


def test_it_is_json_and_complete() -> None:
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert set(SCHEMA["properties"]) == read_keys(STEP, "unheard: 1\n")
    assert SCHEMA["$defs"]["task"]["properties"]["kind"]["enum"] == list(TOOL_KINDS)
    assert read_keys(f"{STEP}  unheard: 1\n") <= set(SCHEMA["$defs"]["step"]["properties"])
    assert read_keys(f"{STEP}  next: {{step: start, unheard: 1}}\n") <= set(SCHEMA["$defs"]["arc"]["properties"])
    loop = f"{STEP}  loop: {{in: [1], iterator: n, unheard: 1}}\n"
    assert read_keys(loop) <= set(SCHEMA["$defs"]["loop"]["properties"])


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    schema()
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_every_reference_leads_somewhere() -> None:
    for reference in _references(SCHEMA):
        assert reference.removeprefix("#/$defs/") in SCHEMA["$defs"]


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


@pytest.mark.parametrize("path", find_playbooks(PLAYBOOKS), ids=lambda path: path.stem)
def test_shipped_playbooks_load_and_use_known_keys(path: Path) -> None:
    loaded = load_playbook(path)
    root = Document(path.read_text(), str(path)).root
    steps = SCHEMA["$defs"]["step"]["properties"]
    assert len(loaded.steps) == len(root["workflow"])
    for entry in root["workflow"]:
        assert entry.keys() <= steps.keys()


@pytest.mark.parametrize(
    ("tool", "is_complete"),
    [
        ({"kind": "container", "image": "i"}, True),
        ({"kind": "container", "runtime": {"image": "i"}}, True),
        ({"kind": "container", "spec": {"image": "i"}}, True),
        ({"kind": "http", "spec": {"endpoint": "x"}}, True),
        ({"kind": "container", "runtime": {"provider": "kubernetes"}}, False),
        ({"kind": "http", "runtime": {"url": "x"}}, False),
    ],
)
def test_what_a_tool_needs_may_stand_where_the_loader_takes_it(tool: dict[str, Any], is_complete: bool) -> None:
    head = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a", "path": "a"}}
    document = {**head, "workflow": [{"step": "start", "tool": tool}]}
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(document) is is_complete
    problems = parse_report(json.dumps(document))[1]
    assert any(problem.kind is ProblemKind.MISSING_FIELD for problem in problems) is not is_complete
