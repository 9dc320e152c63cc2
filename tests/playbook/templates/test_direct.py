"""Expressions that are evaluated without generated code give what the generated code gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from noetl_dagster.playbook.templates import direct, rendering
from noetl_dagster.playbook.templates.reading import ENVIRONMENT, whole_expression
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView

ANSWER = {"status": "ok", "data": {"data": {"rows": [{"n": 1}], "hasMore": True}, "items": 3}, "http": {"status": 200}}

DIRECT = [
    "output.status == 'ok' and not error",
    "output.data.data.rows[0].n",
    "output['http']['status'] in [200, 201]",
    "output.items - 1 < page + 2",
    "pages + [output.data.data]",
    "output.missing or page",
    "missing.deeper",
    "missing and page",
    "missing == 1",
    "missing + 1",
    "page + 'text'",
    "page >= 2",
    "'n' not in output.data.data.rows[0]",
    "text.upper",
    "page.__class__",
    "range",
    "[page, [none, true, 'x']]",
]
GENERATED = [
    "pages | length",
    "page if page else 2",
    "text.upper()",
    "page is defined",
    "1 < page < 3",
    "pages[1:]",
    "-page",
]


def _scope() -> dict[str, Any]:
    return {"output": ResultView(ANSWER, ReferenceCache()), "page": 2, "pages": [{"n": 0}], "text": "text"}


def _outcome(source: str, scope: Mapping[str, Any]) -> Any:
    rendering._compile_text.cache_clear()
    compiled = compile_value("{{ " + source + " }}")
    try:
        return compiled.render(scope)
    except Exception as error:
        return type(error), str(error)


def _direct(source: str) -> Any:
    expression = whole_expression(ENVIRONMENT.parse("{{ " + source + " }}"))
    assert expression is not None
    return direct.direct(expression)


@pytest.mark.parametrize("source", DIRECT)
def test_direct_expressions_do_what_generated_code_does(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _direct(source) is not None
    found = _outcome(f"({source})", _scope())
    monkeypatch.setattr(rendering, "direct", lambda expression: None)
    assert found == _outcome(f"({source})", _scope())


@pytest.mark.parametrize("source", [*GENERATED, " + ".join(["pages"] * direct.MOST_NODES)])
def test_the_others_need_code(source: str) -> None:
    assert _direct(source) is None
