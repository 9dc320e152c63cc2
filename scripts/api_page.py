"""The public names as a page of the documentation, from their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

from docstring_parser import Docstring, DocstringStyle, parse
from pydantic import BaseModel

import noetl_dagster
from noetl_dagster import testing

HEAD = """# Public names

`from noetl_dagster import ...` gives these, loaded when they are first asked for; every other name may change.
Fixtures for pytest are in `noetl_dagster.testing`.
"""
FIXTURES = ("NoetlTest", "noetl", "noetl_settings", "noetl_services")
SECTIONS = (
    ("Playbooks in a Dagster project", ("load_playbooks", "PlaybooksComponent", "PlaybookStep")),
    ("Runs from Python", ("materialize_playbook", "MaterializedPlaybook", "load_playbook", "Playbook")),
    ("Resources", ("NoetlResource", "PySparkResource", "Settings")),
    ("IO managers", ("MinioIOManager", "PvcIOManager", "GcsIOManager", "NoetlResultIOManager")),
    ("Results", ("ResultRef", "frame_of")),
    ("Executors", ("threaded_executor",)),
    ("Errors", ("NoetlError", "PlaybookError", "WorkloadError", "ExecutionFailedError")),
)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_HAS_A_PAGE = ("Settings",)
"""Classes whose fields stand elsewhere in the documentation."""


def reference_page() -> str:
    """``docs/api.md``."""
    parts = [HEAD]
    for title, names in SECTIONS:
        parts.append(f"## {title}\n")
        parts += [_entry(name, getattr(noetl_dagster, name)) for name in names]
    parts.append("## Fixtures\n")
    parts += [_entry(name, getattr(testing, name)) for name in FIXTURES]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _entry(name: str, thing: Any) -> str:
    plain = inspect.unwrap(getattr(thing, "_fixture_function", thing))
    doc = parse(inspect.getdoc(plain) or "", style=DocstringStyle.GOOGLE)
    lines = [f"### {name}\n"]
    if inspect.isfunction(plain):
        lines += ["```python", _signature(name, plain), "```\n"]
    lines += _prose(doc)
    if inspect.isclass(plain):
        lines += [] if name in _HAS_A_PAGE else [*_fields(plain), *_methods(plain)]
    return "\n".join(lines) + "\n"


def _signature(name: str, function: Any) -> str:
    """On one line where it fits, else an argument a line."""
    signature = inspect.signature(function)
    text = f"{name}{signature}".replace("'", "")
    if len(text) <= 100:
        return text
    shown = [str(one).replace("'", "") for one in signature.parameters.values()]
    stars = [one.kind is inspect.Parameter.KEYWORD_ONLY for one in signature.parameters.values()]
    if True in stars:
        shown.insert(stars.index(True), "*")
    returned = str(signature.return_annotation).replace("'", "")
    return "\n".join([f"{name}(", *(f"    {one}," for one in shown), f") -> {returned}"])


def _prose(doc: Docstring) -> list[str]:
    lines = [_markdown(doc.description or ""), ""]
    lines += [f"- `{part.arg_name}`: {_one_line(part.description)}" for part in doc.params]
    if doc.returns is not None:
        lines += ["", f"Returns: {_one_line(doc.returns.description)}"]
    lines += ["", *(f"- raises `{part.type_name}`: {_one_line(part.description)}" for part in doc.raises), ""]
    for example in doc.examples:
        lines += _fenced(example.description or "")
    return lines


def _fenced(text: str) -> list[str]:
    language = "yaml" if "code-block:: yaml" in text else "python"
    body = [line for line in text.splitlines() if "code-block::" not in line]
    return [f"```{language}", inspect.cleandoc("\n".join(body)).strip(), "```", ""]


def _fields(thing: type) -> list[str]:
    """Fields of a model with their defaults and what they mean."""
    if not issubclass(thing, BaseModel):
        return []
    told = [(name, field) for name, field in thing.model_fields.items() if field.description]
    rows = [f"| `{name}` | {_default(field)} | {_in_a_cell(field.description)} |" for name, field in told]
    return ["| field | default | meaning |", "|---|---|---|", *rows, ""] if rows else []


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    return "" if value is None or value in ({}, []) or field.is_required() else f"`{value}`"


def _methods(thing: type) -> list[str]:
    """The public methods and properties that a class defines itself, and says what they do."""
    lines = []
    for name, member in vars(thing).items():
        called = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith(("_", "model_")) or not inspect.isfunction(called) or not called.__doc__:
            continue
        shown = name if isinstance(member, property) else _in_one_line(name, called)
        lines.append(f"- `{shown}`: {_one_line(parse(called.__doc__, style=DocstringStyle.GOOGLE).description)}")
    return [*lines, ""] if lines else []


def _in_one_line(name: str, method: Any) -> str:
    signature = inspect.signature(method)
    own = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    return f"{name}{signature.replace(parameters=own)}".replace("'", "")


def _markdown(text: str) -> str:
    prose, marker, code = text.partition(".. code-block::")
    prose = _ROLE.sub(lambda found: f"`{found[1]}`", prose.replace("``", "`"))
    return prose if not marker else "\n".join([prose, *_fenced(marker + code)])


def _in_a_cell(text: str) -> str:
    return _one_line(text).replace("|", "/")


def _one_line(text: str | None) -> str:
    return " ".join(_markdown(text or "").split())


if __name__ == "__main__":
    print(reference_page(), end="")
