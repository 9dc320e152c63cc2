"""The page of the chart's values from their schema, and the schema in its layout."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from noetl_dagster.playbook.tool_kinds import TOOL_KINDS

CHART = Path(__file__).parents[1] / "helm" / "noetl-dagster"
HEAD = """# Values of the chart

[The chart](../../helm/noetl-dagster/README.md) takes these values. Its schema refuses others.
In bold: values that contain the ones below them. `make docs` generates this page from the values and their schema.
"""
SMALL = 3
"""Defaults of more parts than this stand in rows of their own."""


def chart_page() -> str:
    """``docs/reference/chart-values.md``."""
    values, schema = yaml.safe_load((CHART / "values.yaml").read_text()), _schema()
    rows = [
        "| value | default | meaning |",
        "|---|---|---|",
        *_rows(values, schema["properties"], schema["$defs"]),
    ]
    parts = [HEAD, "\n".join(rows) + "\n"]
    for name, definition in schema["$defs"].items():
        parts.append(f"## {name}\n\n{definition['description']}.\n")
        parts.append("\n".join(["| value | meaning |", "|---|---|", *_meanings(definition)]) + "\n")
    return "\n".join(parts)


def chart_schema() -> str:
    """``values.schema.json``, with the values that defaults require, and the kinds of tools that the code knows."""
    schema = _schema()
    schema["$defs"]["workers"]["properties"]["toolPools"]["propertyNames"] = {"enum": sorted(TOOL_KINDS)}
    _require(yaml.safe_load((CHART / "values.yaml").read_text()), schema)
    return _laid_out(schema, 0) + "\n"


WIDTH = 140


def _laid_out(value: Any, indent: int, key: str = "") -> str:
    """JSON in few lines: what fits into one is on one, and so are neighbours that are no mappings."""
    line = json.dumps(value)
    if indent + len(key) + len(line) < WIDTH or not value or not isinstance(value, dict | list):
        return line
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    lines: list[str] = []
    mergeable = False
    for name, below in zip(keys, value.values() if isinstance(value, dict) else value, strict=True):
        part = name + _laid_out(below, indent + 2, name)
        joins = mergeable and not isinstance(below, dict) and len(lines[-1]) + len(part) + indent + 4 < WIDTH
        lines[-1:] = [f"{lines[-1]}, {part}"] if joins else [*lines[-1:], part]
        mergeable = not isinstance(below, dict) and "\n" not in part
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inner = textwrap.indent(",\n".join(lines), "  ")
    return f"{opening}\n{inner}\n{closing}"


_OPTIONAL = {"resources", "disruptionBudget", "allowedFields", "pod", "securityContext", "annotations", "labels"}
"""Values below which null takes away what the chart says; anywhere else templates would stumble over it."""


def _require(values: dict[str, Any], about: dict[str, Any]) -> None:
    """Every value that has a default is there: Helm drops those that are null."""
    about["required"] = sorted(values.keys() - {"disruptionBudget", "allowedFields", "replicas"})
    for name, default in values.items():
        below = about.get("properties", {}).get(name, {})
        if isinstance(default, dict) and default and name not in _OPTIONAL and name != "pools":
            _require(default, below)


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return schema


def _rows(
    values: dict[str, Any], properties: dict[str, Any], definitions: dict[str, Any], above: str = ""
) -> Iterator[str]:
    for name, default in values.items():
        about, key = properties[name], above + name
        meaning = _cell(about.get("description", "") + _choices(about) + _kind(about))
        below = about.get("properties") or definitions.get(_reference(about), {}).get("properties", {})
        if default and ("properties" in about or len(below) > SMALL) and below.keys() == default.keys():
            yield f"| **`{key}`** | | {meaning} |"
            yield from _rows(default, below, definitions, f"{key}.")
        else:
            yield f"| `{key}` | `{_cell(json.dumps(default))}` | {meaning} |"


def _meanings(definition: dict[str, Any]) -> Iterator[str]:
    for name, about in definition["properties"].items():
        yield f"| `{name}` | {_cell(about.get('description', '') + _choices(about) + _kind(about))} |"


def _choices(about: dict[str, Any]) -> str:
    """The values that there are, unless the description says them."""
    choices = about.get("enum", ())
    words = about.get("description", "")
    return "" if all(choice in words for choice in choices) else f": {', '.join(choices)}"


def _reference(about: dict[str, Any]) -> str:
    return str(about.get("$ref", "")).rpartition("/")[2]


def _kind(about: dict[str, Any]) -> str:
    """A link to the table of the definition that a value is of."""
    name = _reference(about)
    return f" ([{name}](#{name.lower()}))" if name else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
