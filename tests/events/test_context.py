"""What an event may say about the context of a command (seed "Context Sanitization")."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.events.envelopes import MASK, event_context, sanitised, step_summary, truncated
from noetl_dagster.values import encode_json

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)


def test_large_values_leave_a_mark() -> None:
    large = {"rows": ["x" * 100] * 200}
    assert sanitised({"small": {"n": 1}, "large": large}) == {
        "small": {"n": 1},
        "large": {"_truncated": True, "_size": len(encode_json(large))},
    }
    assert truncated("x" * (10 * 1024 - 2)) == "x" * (10 * 1024 - 2), "10 KB exactly still fits"


@pytest.mark.parametrize(
    "key",
    [
        "password",
        "db_password",
        "API_KEY",
        "apiKey",
        "access_token",
        "client_secret",
        "Authorization",
        "tokens",
    ],
)
def test_secrets_are_masked_at_any_depth(key: str) -> None:
    values: dict[str, Any] = {key: "geheim", "nested": [{"deeper": {key: "geheim"}}], "n": 1}
    clean = sanitised(values)
    assert clean == {key: MASK, "nested": [{"deeper": {key: MASK}}], "n": 1}


def test_ordinary_keys_are_not_secrets() -> None:
    values = {"key": "a", "tokenizer": "b", "passenger": "c", "secretary": "d", "page_token_count": 3}
    assert sanitised(values) == values


def test_passwords_in_addresses_are_masked() -> None:
    clean = sanitised({"url": "postgresql://ada:geheim@db:5432/x", "plain": "http://db/x?a=b@c"})
    assert clean == {"url": f"postgresql://ada:{MASK}@db:5432/x", "plain": "http://db/x?a=b@c"}


def test_internal_keys_are_left_out() -> None:
    assert sanitised({"_scope": 1, "n": 2}) == {"n": 2}


@pytest.mark.parametrize(
    ("envelope", "summary"),
    [
        ({"status": "ok", "data": {"a": 1}}, {"has_data": True, "status": "success", "data_type": "dict"}),
        ({"status": "ok", "data": None}, {"has_data": False, "status": "success", "data_type": "NoneType"}),
        (
            {"status": "ok", "ref": "noetl://r"},
            {"has_data": True, "status": "success", "data_type": "reference"},
        ),
        ({"status": "error", "error": {}}, {"has_data": False, "status": "error", "data_type": "NoneType"}),
    ],
)
def test_results_are_only_summarised(envelope: dict[str, Any], summary: dict[str, Any]) -> None:
    assert step_summary(envelope) == summary


@given(workload=st.dictionaries(st.text(max_size=10), json_values, max_size=6))
def test_a_context_is_bounded_and_holds_no_result(workload: dict[str, Any]) -> None:
    context = event_context(
        execution_id=1,
        catalog_id=2,
        command_id="1:s:1:1",
        workload=workload,
        vars={"password": "geheim"},
        results={"fetch": {"status": "ok", "data": ["geheim"] * 1000}},
    )
    assert context.keys() == {"execution_id", "job_id", "catalog_id", "workload", "vars", "_step_results"}
    assert b"geheim" not in encode_json({key: context[key] for key in ("vars", "_step_results")})
    assert all(len(encode_json(value)) <= 10 * 1024 for value in context["workload"].values())
