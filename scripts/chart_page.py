"""The chart's README from its values and their schema; ``--schema``: the schema, with the settings that there are."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr

from noetl_dagster.settings import Settings

CHART = Path(__file__).parents[1] / "helm" / "noetl-dagster"
SMALL = 3
"""Defaults of more parts than this stand in rows of their own."""


def chart_page() -> str:
    """``helm/noetl-dagster/README.md``."""
    values, schema = yaml.safe_load((CHART / "values.yaml").read_text()), _schema()
    rows = [
        "| value | default | meaning |",
        "|---|---|---|",
        *_rows(values, schema["properties"], schema["$defs"]),
    ]
    parts = [(CHART / "files" / "README.head.md").read_text(), "## Values\n", "\n".join(rows) + "\n"]
    for name, definition in schema["$defs"].items():
        parts.append(f"### {name}\n\n{definition['description']}.\n")
        parts.append("\n".join(["| value | meaning |", "|---|---|", *_meanings(definition)]) + "\n")
    return "\n".join(parts)


def chart_schema() -> str:
    """``values.schema.json``, whose ``settings`` takes what no other value sets and what is no secret."""
    schema = _schema()
    schema["properties"]["settings"]["propertyNames"] = {"enum": sorted(free_settings())}
    return json.dumps(schema, indent=2) + "\n"


def free_settings() -> set[str]:
    """Names of settings that no template writes and that hold no secret."""
    written = {name for path in (CHART / "templates").rglob("*") if path.is_file() for name in _names(path)}
    return {
        f"NOETL_{name.upper()}"
        for name, field in Settings.model_fields.items()
        if field.annotation not in (SecretStr, SecretStr | None)
    } - written


def _names(path: Path) -> set[str]:
    return set(re.findall(r"NOETL_[A-Z0-9_]+", path.read_text()))


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


if __name__ == "__main__":
    sys.stdout.write(chart_schema() if "--schema" in sys.argv[1:] else chart_page())
