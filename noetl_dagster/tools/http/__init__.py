"""``kind: http``: its fields; requests and their bodies."""

from __future__ import annotations

from typing import Any

from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.tool_kinds import (
    HTTP_BODY,
    NUMBER_WORDS,
    NUMBERS,
    REQUEST,
    TEXT_FORMATS,
    TIMEOUT,
    URL,
    ToolKind,
)

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
_FORM = "application/x-www-form-urlencoded"


def _check(block: Block, config: dict[str, Any]) -> None:
    """Reports an unknown method, and takes a body as a form if the headers call it one."""
    method, headers = config.get("method"), config.get("headers")
    if isinstance(method, str) and "{{" not in method and method.upper() not in _METHODS:
        block.error(f"method {method!r} is unknown; use one of {', '.join(_METHODS)}", "method")
    named = headers if isinstance(headers, dict) else {}
    content = {name.lower(): str(value) for name, value in named.items()}.get("content-type", "")
    if content.startswith(_FORM) and isinstance(config.get("json"), dict):
        config["form"] = config.pop("json")


KINDS = (
    ToolKind(
        "http",
        "noetl_dagster.tools.http.tool:HttpTool",
        {
            URL: "Address; relative to the credential's url if that has one",
            "method": "Method of the request; default: GET",
            "headers": "Headers of the request",
            ("params", "query", "query_params"): "Query parameters of the request",
            HTTP_BODY: "Body: mappings and lists are sent as JSON, text as it is",
            "pages": "How the next page is found: {link}, {next}, {cursor, param}, {number} or {offset}, and rows",
            ("form", "form_data"): "Fields of a form, sent as the body",
            "format": "Format of the body's rows: jsonl, csv or json; data is then a list of rows. text: data is text, "
            "whatever its content type",
            "charset": "Encoding of the body, if the server names none or a wrong one",
            "numbers": NUMBERS,
            TIMEOUT: "Seconds to connect, and for each part of the response; default: 30",
            ("verify_ssl", "verify", "ssl_verify"): "Whether the server's certificate is checked; default: true",
            ("follow_redirects", "allow_redirects"): "Whether redirects are followed; default: true",
        },
        needs=("url",),
        words={"format": (*TEXT_FORMATS, "text"), "numbers": NUMBER_WORDS},
        without_effect=("as", "stream", "response_type", "response_format"),
        sent=REQUEST,
        check=_check,
    ),
)
