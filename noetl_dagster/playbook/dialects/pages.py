"""Reads ``pages``: how an http task finds its next page. It becomes a rule of the task's ``retry``."""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import ProblemKind, TemplateError
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.models import Collect, NextCall, RetryRule
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.wording import is_template

_WAYS = {
    "link": (),
    "next": (),
    "cursor": ("param",),
    "number": ("start", "until", "total"),
    "offset": ("start", "limit", "until", "total"),
}
"""The ways to find the next page, each with the keys that belong to it."""

_COMMON = ("rows", "max_pages", "delay")
_BODY = "output.response"


def read_pages(block: Block, config: dict[str, Any]) -> RetryRule | None:
    """Returns the rule that requests the next page; adds parameters of the first page to ``config``."""
    pages = block.child("pages")
    config.pop("pages", None)
    if pages is None:
        return None
    ways = [name for name in _WAYS if name in pages]
    if len(ways) != 1:
        pages.error(f"one of {', '.join(_WAYS)} is needed, which says how the next page is found")
        return None
    [way] = ways
    params = config.get("params")
    reader = _PagesReader(pages, way, dict(params) if isinstance(params, dict) else {})
    more, following = {"link": reader.link, "next": reader.next, "cursor": reader.cursor}.get(way, reader.counted)()
    if not isinstance(params, str) and reader.params != (params or {}):
        config["params"] = reader.params
    rule = pages.build(
        RetryRule,
        when=f"{{{{ {more} }}}}",
        strict=True,
        max_attempts=pages.whole("max_pages"),
        delay=pages.seconds("delay"),
        next_call=NextCall(**following),
        collect=Collect(path=reader.rows_path or None),
    )
    pages.close((*_WAYS, *_WAYS[way], *_COMMON))
    return rule


class _PagesReader:
    """Makes the expressions of one ``pages``.

    Attributes:
        params: those of the first request.
        rows_path: the path of the rows in a body; empty for the body itself.
        rows: the expression of the rows of a page; None if the playbook does not name them.
    """

    def __init__(self, pages: Block, way: str, params: dict[str, Any]) -> None:
        self._pages, self._way, self.params = pages, way, params
        self._name = pages.text(way) or ""
        named = pages.text("rows")
        self.rows_path = ".".join(_path(named or ""))
        self.rows = None if named is None else _of_path(_path(named))

    def link(self) -> tuple[str, dict[str, Any]]:
        """Follows the header ``Link`` (RFC 8288)."""
        address = f"output.http.links[{self._name!r}]"
        return f"{address} is defined", {"url": f"{{{{ {address} | next_url(output.url) }}}}"}

    def next(self) -> tuple[str, dict[str, Any]]:
        """Follows an address in the body."""
        more, address = self._present(self._way)
        return more, {"url": f"{{{{ {address} | next_url(output.url) }}}}"}

    def cursor(self) -> tuple[str, dict[str, Any]]:
        """Sends a value of the body as a parameter."""
        more, value = self._present(self._way)
        param = self._pages.text("param")
        if param is None:
            self._pages.missing("'param' is missing: the query parameter that gets the cursor")
        return more, {"params": {param or "cursor": f"{{{{ {value} }}}}"}}

    def counted(self) -> tuple[str, dict[str, Any]]:
        """Counts pages or rows in a parameter."""
        pages, is_number = self._pages, self._way == "number"
        start = pages.take("start")
        start = self.params.setdefault(self._name, int(is_number) if start is None else start)
        if not is_number and (limit := pages.take("limit")) is not None:
            self.params.setdefault("limit", limit)
        until = self._expression("until") if "until" in pages else None
        if self.rows is None and (until is None or not is_number or "total" in pages):
            remedy = "'rows' is missing: the path of the rows in the body, or response if the body is the list"
            pages.missing(remedy + (", or write 'until'" if is_number else ""))
        rows = f"({self.rows or _BODY} | length)"
        more = f"{rows} > 0" if until is None else f"({until} == 0 or not {until})"  # an undefined name is an error
        if "total" in pages:
            more += f" and _rows + {rows} < ({self._value('total')} | int)"
        count = "_page" if is_number else f"_rows + {rows}"
        return more, {"params": {self._name: f"{{{{ ({_expression_of(start)} | int) + {count} }}}}"}}

    def _present(self, key: str) -> tuple[str, str]:
        """Returns the conditions under which a value of the body leads on, and the value."""
        value = self._value(key)
        path = _path(self._pages.text(key) or "")
        if is_template(str(self._pages[key])) or not path:
            return f"{value} != 0 and {value}", value  # an undefined name is an error
        return f"{path[-1]!r} in {_of_path(path[:-1])} and {value}", value

    def _value(self, key: str) -> str:
        text = self._pages.text(key) or ""
        return self._expression(key) if is_template(text) else _of_path(_path(text))

    def _expression(self, key: str) -> str:
        """Returns the expression of a template."""
        text = (self._pages.text(key) or "").strip()
        try:
            is_expression = compile_value(text).is_expression
        except TemplateError as error:
            self._pages.error(f"{key}: {error}", key, ProblemKind.TEMPLATE_SYNTAX)
            return "false"
        if not is_expression:
            self._pages.error(f"{key} must be one template: {{{{ ... }}}}", key)
            return "false"
        return f"({_expression_of(text)})"


def _expression_of(value: Any) -> str:
    text = str(value).strip()
    return text[2:-2].strip(" -+") if text.startswith("{{") else repr(value)


def _path(text: str) -> list[str]:
    """Returns the keys of a path in the body; ``response`` is the body itself."""
    parts = [part for part in text.strip().split(".") if part]
    return parts[1:] if parts[:1] == ["response"] else parts


def _of_path(path: list[str]) -> str:
    return _BODY + "".join(f"[{int(part) if part.isdigit() else part!r}]" for part in path)
