"""Reads ``pages``: how an http task finds its next page. It becomes a rule of the task's ``retry``."""

from __future__ import annotations

from typing import Any

from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.retry import expression
from noetl_dagster.playbook.models import Collect, NextCall, RetryRule
from noetl_dagster.playbook.wording import is_template

_COUNTED = ("start", "limit", "until", "total")
_WAYS = {"link": (), "next": (), "cursor": ("param",), "number": _COUNTED, "offset": _COUNTED}
"""The ways to find the next page, each with the keys that belong to it."""

_COMMON = ("rows", "max_pages", "delay")


def read_pages(block: Block, config: dict[str, Any]) -> RetryRule | None:
    """Returns the rule that requests the next page. Adds parameters of the first page to ``config``."""
    pages = block.child("pages")
    del config["pages"]
    ways = [way for way in _WAYS if pages is not None and way in pages]
    if pages is None or len(ways) != 1:
        if pages is not None:
            pages.error(f"one of {', '.join(_WAYS)} is needed, which says how the next page is found")
        return None
    [way] = ways
    if way in ("number", "offset"):
        when, following = _counted(pages, way, config)
    elif way == "link":
        link = f"output.http.links[{pages.text(way)!r}]"
        when, following = f"{link} is defined", _address(link)
    else:
        when, value = _leads_on(pages, way)
        param = pages.text("param")
        following = {"params": {param: f"{{{{ {value} }}}}"}} if way == "cursor" and param else _address(value)
        if way == "cursor" and param is None:
            pages.missing("'param' is missing: the query parameter that gets the cursor")
    rule = pages.build(
        RetryRule,
        when=f"{{{{ {when} }}}}",
        max_attempts=pages.whole("max_pages"),
        delay=pages.seconds("delay"),
        next_call=NextCall(**following),
        collect=Collect(path=".".join(_path(pages.text("rows"))) or None),
    )
    pages.close((*_WAYS, *_WAYS[way], *_COMMON))
    return rule


def _counted(pages: Block, way: str, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Counts pages or rows in a parameter, which the first page gets, too."""
    name, start, params = str(pages.text(way)), pages.take("start"), config.get("params") or {}
    if isinstance(params, dict):
        first = {name: int(way == "number") if start is None else start}
        limit = pages.take("limit")
        params = config["params"] = first | ({} if limit is None else {"limit": limit}) | params
        start = params[name]
    if "rows" not in pages and (way == "offset" or "until" not in pages or "total" in pages):
        pages.missing("'rows' is missing: the path of the rows in the body, or response if the body is the list")
    count = f"({_of_path(_path(pages.text('rows')))} | length)"
    when = f"{count} > 0"
    if pages.take("until") is not None:  # the comparison makes an undefined name an error
        until = expression(pages, "until")
        when = f"(({until}) == 0 or not ({until}))"
    if "total" in pages:
        when += f" and _rows + {count} < ({_value(pages, 'total')} | int)"
    begin = str(start).strip("{} ") if isinstance(start, str) else start
    reached = "_page" if way == "number" else f"_rows + {count}"
    return when, {"params": {name: f"{{{{ ({begin} | int) + {reached} }}}}"}}


def _address(value: str) -> dict[str, Any]:
    return {"url": f"{{{{ {value} | next_url(output.url) }}}}"}


def _leads_on(pages: Block, key: str) -> tuple[str, str]:
    """Returns the condition that a value of the body leads to another page, and the value.

    The last key of a path may be missing in the last page. Any other name that is undefined is an error.
    """
    path, value = _path(pages.text(key)), _value(pages, key)
    if is_template(str(pages[key])) or not path:
        return f"{value} != 0 and {value}", value
    return f"{path[-1]!r} in {_of_path(path[:-1])} and {value}", value


def _value(pages: Block, key: str) -> str:
    """Returns the expression of a template, or of a path in the body."""
    text = pages.text(key)
    return f"({expression(pages, key)})" if is_template(str(text)) else _of_path(_path(text))


def _path(text: str | None) -> list[str]:
    """Returns the keys of a path in the body; ``response`` is the body itself."""
    parts = [part for part in (text or "").strip().split(".") if part]
    return parts[1:] if parts[:1] == ["response"] else parts


def _of_path(path: list[str]) -> str:
    return "output.response" + "".join(f"[{int(part) if part.isdigit() else part!r}]" for part in path)
