"""The chart's README from its values and their schema, and the schema with the settings of the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import yaml
from dagster._config import (
    Array,
    ConfigBoolInstance,
    ConfigFloatInstance,
    ConfigIntInstance,
    ConfigStringInstance,
    ConfigType,
    Noneable,
    ScalarUnion,
    Selector,
    Shape,
)
from dagster._config import Enum as ConfigEnum
from dagster._core.instance.config import dagster_instance_config_schema
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from noetl_dagster.playbook.tool_kinds import SUPPORTED_KINDS
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
    """``values.schema.json`` with what the code knows: settings, kinds of tools, and the keys of ``dagster.yaml``.

    ``settings`` takes what no other value sets and what is no secret. Templates refuse the secrets of ``secrets`` and
    the keys of ``dagster.yaml`` that are the chart's, with the remedy.
    """
    schema = _schema()
    settings = {name: _setting(Settings.model_fields[_field(name)]) for name in sorted(free_settings())}
    settings |= {name: {"description": "A secret: use the value secrets"} for name in sorted(secret_settings())}
    schema["properties"]["settings"] |= {"additionalProperties": False, "properties": settings}
    schema["$defs"]["workers"]["properties"]["toolPools"]["propertyNames"] = {"enum": sorted(SUPPORTED_KINDS)}
    instance = {
        name: {} if name in _written_keys() else _instance(field.config_type)
        for name, field in dagster_instance_config_schema().items()
    }
    _require(yaml.safe_load((CHART / "values.yaml").read_text()), schema)
    retention = dagster_instance_config_schema()["retention"].config_type
    dagster = schema["properties"]["dagster"]["properties"]
    dagster["retention"] |= _instance(retention)
    dagster["extraInstance"] |= {"additionalProperties": False, "properties": _as_in_dagster(instance)}
    return json.dumps(schema, indent=2) + "\n"


_OPTIONAL = {"resources", "disruptionBudget", "pod", "securityContext", "annotations", "labels"}
"""Values below which null takes away what the chart says; anywhere else templates would stumble over it."""


def _require(values: dict[str, Any], about: dict[str, Any]) -> None:
    """Every value that has a default is there: Helm drops those that are null."""
    about["required"] = sorted(values.keys() - {"disruptionBudget"})
    for name, default in values.items():
        below = about.get("properties", {}).get(name, {})
        if isinstance(default, dict) and default and name not in _OPTIONAL and name != "pools":
            _require(default, below)


def secret_settings() -> set[str]:
    """Names of settings that ``secrets`` gives."""
    return set(re.findall(r"variable: (NOETL_[A-Z0-9_]+)", (CHART / "templates" / "_settings.tpl").read_text()))


def _written_keys() -> set[str]:
    """Keys of ``dagster.yaml`` that the chart writes, or that stand in for one of those."""
    check = (CHART / "templates" / "_check.tpl").read_text()
    return set(re.findall(r'"(\w+)"', check.split("{{- $written := list", 1)[1].split("}}", 1)[0]))


def _field(setting: str) -> str:
    return setting.removeprefix("NOETL_").lower()


_WORDS = {
    int: {"type": ["integer", "string"], "pattern": "^-?[0-9]+$"},
    float: {"type": ["number", "string"], "pattern": "^-?[0-9]+([.][0-9]+)?$"},
    bool: {"type": ["boolean", "string"], "enum": [True, False, "true", "false"]},
}
"""Types of settings as values say them: texts do too, as in the environment."""

_BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def _setting(field: FieldInfo) -> dict[str, Any]:
    """The schema of a setting."""
    kind = next((one for one in get_args(field.annotation) if one is not type(None)), field.annotation)
    about: dict[str, Any] = {"description": field.description, **_WORDS.get(kind, {"type": "string"})}
    if isinstance(kind, type) and issubclass(kind, Enum):
        about["enum"] = [one.value for one in kind]
    for bound in field.metadata:
        about |= {word: getattr(bound, name) for name, word in _BOUNDS.items() if hasattr(bound, name)}
    return about


_SCALARS = {
    ConfigIntInstance.key: "integer",
    ConfigFloatInstance.key: "number",
    ConfigBoolInstance.key: "boolean",
    ConfigStringInstance.key: "string",
}


def _instance(kind: ConfigType) -> dict[str, Any]:
    """What Dagster takes for a value of ``dagster.yaml``; {}: anything, or too much for a schema."""
    if isinstance(kind, ConfigEnum):
        return {"enum": [one.config_value for one in kind.enum_values]}
    if isinstance(kind, Noneable):
        inner = _instance(kind.inner_type)
        return {"anyOf": [{"type": "null"}, inner]} if inner else {}
    if isinstance(kind, Array):
        return {"type": "array", "items": _instance(kind.inner_type)}
    if isinstance(kind, ScalarUnion):
        return {"anyOf": [_instance(kind.scalar_type), _instance(kind.non_scalar_type)]}
    if isinstance(kind, Shape | Selector):
        below = {name: _instance(field.config_type) for name, field in kind.fields.items()}
        return {"type": "object", "additionalProperties": False, "properties": _as_in_dagster(below)}
    return {"type": _SCALARS[kind.key]} if kind.key in _SCALARS else {}


def _as_in_dagster(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"description": "As in dagster.yaml", **about} for name, about in sorted(values.items())}


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
