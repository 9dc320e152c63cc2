"""The HTTP API as a page of the documentation, from its OpenAPI document and its routes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docstring_parser import DocstringStyle, parse
from page_text import cell, code, markdown, page, table

from noetl_dagster.service import commands
from noetl_dagster.service.access import Requires
from noetl_dagster.service.app import MODULES, create_app
from noetl_dagster.settings import Settings

HEAD = """# HTTP API

All requests of the HTTP API, which `noetl-dagster serve` answers. `/openapi.json` describes the same requests for
programs. [The worker protocol](worker-protocol.md) explains the requests of workers.

Bodies are JSON, with `content-type: application/json`. If the service has tokens (`NOETL_SERVICE_TOKENS`), send one as
`Authorization: Bearer TOKEN`. It must have one of the scopes of the request. A service without tokens accepts requests
of the same machine only. Below `/api/`, they need the header `X-NoETL-Client` with the name of your program. See
[access](worker-protocol.md#access).

```sh
curl -H "Authorization: Bearer $TOKEN" http://127.0.0.1:8700/api/executions?limit=5
```

Identifiers are integers of 63 bits. Answers contain them as text, because JavaScript rounds such numbers. Requests
accept both.

## Errors

An error is a problem document (RFC 9457, `application/problem+json`):
`{"status": 404, "title": "Not Found", "detail": "..."}`.

| status | meaning |
|---|---|
| 400 | The request is not valid HTTP, or its `Host` header is not allowed. |
| 401 | The token is missing or unknown. |
| 403 | The token lacks the scope, a page of another site sent the request, or the header `X-NoETL-Client` is missing. |
| 404 | The execution, command, playbook or result does not exist. |
| 409 | The state does not allow the request, or another worker holds the command. |
| 413 | The body is larger than `NOETL_SERVICE_BODY_BYTES`. |
| 415 | The body is not declared as JSON. |
| 422 | The body is not valid JSON, or a field is missing or invalid. `detail` names the first one. |
| 429 | The client sends more than `NOETL_SERVICE_RATE` requests per second. `retry-after` is the time to wait. |
| 503 | PostgreSQL or another service is unavailable. `retry-after` is the time to wait. |
"""
TITLES = {
    "executions": "Executions",
    "catalog": "Catalog",
    "results": "Results",
    "health": "Health",
    "workers": "Workers",
    "dead letters": "Dead letters",
    "commands": "Commands and their playbooks",
}
_REFERENCE = re.compile(r"#/components/schemas/([A-Za-z]+)(?:-\w+)?$")


def http_page() -> str:
    """``docs/reference/http-api.md``."""
    document = create_app(Settings(), lambda: None).openapi()
    scopes = {
        (method, route.path_format): _scopes(route.dependant)
        for router in (commands.workers, *(module.router for module in MODULES))
        for route in router.routes
        for method in route.methods
    }
    parts: list[str] = [HEAD]
    for tag, title in TITLES.items():
        parts.append(f"## {title}\n")
        for path, methods in document["paths"].items():
            for method, about in methods.items():
                if about["tags"] == [tag]:
                    parts += _request(method.upper(), path, about, scopes[method.upper(), path])
    parts.append("## Objects\n\nThe bodies of requests and answers.\n")
    schemas = {f"#/components/schemas/{name}": schema for name, schema in document["components"]["schemas"].items()}
    seen: set[str] = set()
    for reference, schema in schemas.items():
        name = _name(reference)
        if name not in seen:
            seen.add(name)
            parts += _object(name, schema)
    return page(parts)


def _scopes(dependant: Any) -> str:
    names = [one.call.names for one in dependant.dependencies if isinstance(one.call, Requires)]
    return names[0] if names else ""


def _request(method: str, path: str, about: dict[str, Any], scopes: str) -> Iterator[str]:
    yield f"### {method} {path}\n"
    yield markdown(about.get("description", "")) + "\n"
    yield f"Scope: {scopes or 'none'}.\n"
    yield from table(
        ("parameter", "in", "type", "default", "meaning"),
        (
            (code(one["name"]), one["in"], _type(one["schema"]), code(one["schema"].get("default")), cell(_about(one)))
            for one in about.get("parameters", ())
        ),
    )
    for content in about.get("requestBody", {}).get("content", {}).values():
        yield f"Body: {_type(content['schema'])}.\n"
    answers = [
        f"{status} {_type(schema)}".rstrip()
        for status, answer in about["responses"].items()
        if status.startswith("2")
        for schema in [next(iter(answer.get("content", {}).values()), {}).get("schema", {})]
    ]
    yield f"Answer: {' or '.join(answers)}{' with the bytes' if path.endswith('/content') else ''}.\n"


def _object(name: str, schema: dict[str, Any]) -> Iterator[str]:
    doc = parse(schema.get("description", ""), style=DocstringStyle.GOOGLE)
    meanings = {one.arg_name: one.description for one in doc.params}
    yield f"### {name}\n"
    yield markdown(doc.description or "") + "\n"
    if "enum" in schema:
        yield f"One of {', '.join(map(code, schema['enum']))}.\n"
    required = schema.get("required", ())
    yield from table(
        ("field", "type", "default", "meaning"),
        (
            (
                code(field),
                _type(about),
                "required" if field in required else code(about.get("default")),
                cell(_about(about) or meanings.get(field)),
            )
            for field, about in schema.get("properties", {}).items()
        ),
    )


def _about(thing: dict[str, Any]) -> str:
    return str(thing.get("description") or thing.get("schema", {}).get("description") or "")


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = _name(schema["$ref"])
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        return f"object of {_type(values)}"
    kind = str(schema.get("type", "any value" if schema.get("title") else ""))
    return "time" if schema.get("format") == "date-time" else kind


def _name(reference: str) -> str:
    found = _REFERENCE.search(reference)
    assert found is not None, reference
    return found[1]
