"""``error.kind`` as templates see it: a kind of error, which also equals the tool that failed."""

from __future__ import annotations

import pickle
from typing import Any

import orjson
import pytest

from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView, SeenKind, plain, seen_error

LATE = {"kind": "timeout", "source": "http", "message": "late", "retryable": True}


def test_what_is_kept_of_a_kind_is_the_kind_alone() -> None:
    kept = compile_value({"kind": "{{ error.kind }}", "error": "{{ error }}"}).render({"error": seen_error(LATE)})

    assert plain(kept) == {"kind": "timeout", "error": LATE}
    assert type(plain(kept)["kind"]) is type(plain(kept)["error"]["kind"]) is str


@pytest.mark.parametrize(
    ("test", "holds"),
    [
        ("error.kind == 'timeout'", True),
        ("error.kind == 'http'", True),
        ("'http' == error.kind", True),
        ("error.kind != 'http'", False),
        ("error.kind in ['http', 'postgres']", True),
        ("error.kind in ('connection', 'timeout')", True),
        ("error.kind not in ['timeout']", False),
        ("error.kind == 'postgres'", False),
        ("output.error.kind == 'http'", True),
        ("error.source == 'http'", True),
        ("error.kind | upper == 'TIMEOUT'", True),
        ("[output] | selectattr('error.kind', 'equalto', 'http') | list | length == 1", True),
    ],
)
def test_a_kind_matches_itself_and_its_tool(test: str, holds: bool) -> None:
    output = ResultView({"status": "error", "error": LATE}, ReferenceCache())
    scope = {"error": seen_error(LATE), "output": output}

    assert compile_value(f"{{{{ {test} }}}}").render(scope) is holds


def test_to_everything_else_it_is_the_kind_alone() -> None:
    kind = SeenKind("timeout", "http")

    assert orjson.dumps({"kind": kind}) == b'{"kind":"timeout"}'
    assert f"{kind}" == str(pickle.loads(pickle.dumps(kind))) == "timeout"
    assert kind in {"timeout"}


@pytest.mark.parametrize("error", [None, {"kind": "http", "message": "x"}, {"kind": "http", "source": None}])
def test_errors_of_older_logs_are_left_as_they_are(error: Any) -> None:
    assert seen_error(error) is error
