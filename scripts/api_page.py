"""The public names as a page of the documentation, from their signatures and docstrings."""

from __future__ import annotations

import inspect
from typing import Any

from docstring_parser import Docstring, DocstringStyle, parse
from page_text import cell, code, fenced, markdown, one_line, page, table
from pydantic import BaseModel

import noetl_dagster
from noetl_dagster import testing

HEAD = """# Python API

The public names of the package. Import them with `from noetl_dagster import ...`. All other names may change in any
version. Fixtures for pytest and runs with mocks are in `noetl_dagster.testing`.
"""
TESTS = ("run_playbook", "PlaybookRun", "NoetlTest", "noetl", "noetl_settings", "noetl_services")
SECTIONS = (
    ("Playbooks in a Dagster project", ("load_playbooks", "PlaybooksComponent", "PlaybookStep")),
    ("Runs from Python", ("materialize_playbook", "MaterializedPlaybook", "load_playbook", "Playbook")),
    ("Resources", ("NoetlResource", "PySparkResource", "Settings")),
    ("IO managers", ("MinioIOManager", "PvcIOManager", "GcsIOManager", "NoetlResultIOManager")),
    ("Results", ("ResultRef", "frame_of")),
    ("Tools of your own", ("ToolKind", "ToolCall", "ToolResult", "ToolContext")),
    ("Executors", ("threaded_executor",)),
    ("Errors", ("NoetlError", "PlaybookError", "WorkloadError", "ExecutionFailedError")),
)
_HAS_A_PAGE = ("Settings",)
"""Classes whose fields have a page of their own."""


def api_page() -> str:
    """``docs/reference/python-api.md``."""
    parts = [HEAD]
    for title, names in SECTIONS:
        parts.append(f"## {title}\n")
        parts += [_entry(name, getattr(noetl_dagster, name)) for name in names]
    parts.append("## Tests\n")
    parts += [_entry(name, getattr(testing, name)) for name in TESTS]
    return page(parts)


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
    lines = [markdown(doc.description or ""), ""]
    lines += [f"- `{part.arg_name}`: {one_line(part.description)}" for part in doc.params]
    if doc.returns is not None:
        lines += ["", f"Returns: {one_line(doc.returns.description)}"]
    lines += ["", *(f"- raises `{part.type_name}`: {one_line(part.description)}" for part in doc.raises), ""]
    for example in doc.examples:
        lines += fenced(example.description or "")
    return lines


def _fields(thing: type) -> list[str]:
    """Fields of a model with their defaults and what they mean."""
    if not issubclass(thing, BaseModel):
        return []
    told = [(name, field) for name, field in thing.model_fields.items() if field.description]
    rows = [(code(name), _default(field), cell(field.description)) for name, field in told]
    return table(("field", "default", "meaning"), rows)


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
        shown = name if isinstance(member, property) else _inone_line(name, called)
        lines.append(f"- `{shown}`: {one_line(parse(called.__doc__, style=DocstringStyle.GOOGLE).description)}")
    return [*lines, ""] if lines else []


def _inone_line(name: str, method: Any) -> str:
    signature = inspect.signature(method)
    own = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    return f"{name}{signature.replace(parameters=own)}".replace("'", "")
