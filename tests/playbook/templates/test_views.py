"""What results look like to templates (DSL section 3)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache, ReferenceNeeded, ResultView, plain
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import StoreTier

REFERENCE = ResultRef(
    ref="noetl://execution/1/result/big/7",
    execution_id=1,
    source_step="big",
    name="big",
    store_tier=StoreTier.MINIO,
    physical_uri="s3://bucket/key",
)


def view(data: Any = None, **envelope: Any) -> ResultView:
    return ResultView({"status": "ok", "data": data, **envelope}, ReferenceCache())


def render(template: Any, **names: Any) -> Any:
    return compile_value(template).render(names)


HTTP = {"status_code": 200, "headers": {}, "data": {"rows": [1, 2], "items": [3], "paging": {"page": 4}}}


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ step.status }}", "ok"),
        ("{{ step.status_code }}", 200),
        ("{{ step.data.status_code }}", 200),
        ("{{ step.rows }}", [1, 2]),
        ("{{ step.data.rows }}", [1, 2]),
        ("{{ step.data.data.rows }}", [1, 2]),
        ("{{ step['rows'][0] }}", 1),
        ("{{ step.result.data.rows }}", [1, 2]),
        ("{{ step.data.paging.page }}", 4),
        ("{{ step.items }}", [3]),
        ("{{ step.data.items }}", [3]),
        ("{{ step.get('rows') }}", [1, 2]),
        ("{{ step.get('nope', 9) }}", 9),
        ("{{ step }}", HTTP),
        ("{{ step.data }}", HTTP),
        ("{{ step | length }}", 3),
        ("{{ step.nope is defined }}", False),
        ("{{ step.nope | default('x') }}", "x"),
        ("{{ 'rows' in step }}", True),
        ("{{ step.data | tojson | fromjson }}", HTTP),
    ],
)
def test_one_tolerant_view_over_the_envelope(template: str, value: Any) -> None:
    assert render(template, step=view(HTTP)) == value


def test_statements_of_postgres_by_every_path() -> None:
    data = {"command_0": {"rows": [{"n": 1}]}, "rows": [{"n": 1}], "row_count": 1}
    for template in ("{{ s.rows[0].n }}", "{{ s.data.rows[0].n }}", "{{ s.data.command_0.rows[0].n }}"):
        assert render(template, s=view(data)) == 1


def test_columns_named_like_methods_of_mappings() -> None:
    data = {"rows": [{"items": 1, "keys": 2, "values": 3, "get": 4}]}
    template = "{{ [s.rows[0].items, s.rows[0].keys, s.rows[0].values, s.rows[0].get] }}"
    assert render(template, s=view(data)) == [1, 2, 3, 4]


def test_methods_of_mappings_work_where_no_key_hides_them() -> None:
    assert render("{{ s.data.items() }}", s=view({"a": 1})) == [["a", 1]]
    assert render("{% for k, v in s.items() %}{{ k }}={{ v }}{% endfor %}", s=view({"a": 1})) == "a=1"


@pytest.mark.parametrize(
    ("template", "data", "value"),
    [
        ("{{ s[1] }}", [5, 6], 6),
        ("{{ s | first }}", [5, 6], 5),
        ("{{ s | length }}", [5, 6], 2),
        ("{{ s | map(attribute='a') }}", [{"a": 1}, {"a": 2}], [1, 2]),
        ("{{ s + 1 }}", 4, 5),
        ("{{ 1 + s }}", 4, 5),
        ("{{ s * 2 }}", 4, 8),
        ("{{ s > 3 and s <= 4 and s == 4 and s != 5 }}", 4, True),
        ("{{ s | int }}", "7", 7),
        ("{{ s | lower }}", "ABC", "abc"),
        ("n={{ s }}", 4, "n=4"),
        ("{{ 'yes' if s else 'no' }}", [], "no"),
        ("{{ s }}", None, None),
        ("{{ [s % 3, s // 3, s ** 2, -s, +s, s / 8] }}", 4, [1, 1, 16, -4, 4, 0.5]),
        ("{{ [9 % s, 9 // s, 2 ** s, 8 / s, 3 * s, 9 - s] }}", 4, [1, 2, 16, 2, 12, 5]),
        ("{{ [s | abs, s | round, s | float] }}", -4, [4, -4, -4.0]),
        ("{{ [s is number, s is integer, s is even, s is string, s is none] }}", 4, [True, True, True, False, False]),
        ("{{ range(s) | list }}", 3, [0, 1, 2]),
        ("{{ [5, 6, 7][s] }}", 1, 6),
        ("{{ {'a': 1}[s] }}", "a", 1),
        ("{{ [s in {'a': 1}, s in ['a'], 'a' in s] }}", "a", [True, True, True]),
        ("{{ [s is string, s is mapping, s is number] }}", "a", [True, False, False]),
        ("{{ [s is mapping, s is sequence, s is iterable] }}", {"a": 1}, [True, True, True]),
        ("{{ s is none }}", None, True),
        ("{{ [s is boolean, s is true] }}", True, [True, True]),
        ("{{ s.upper() }} {{ s.split(',')[1] }} {{ s.startswith('a') }}", "a,b", "A,B b True"),
        ("{{ s.data.upper() }}", "a", "A"),
        ("{{ s.upper is defined }}", "a", False),
        ("{{ s | urlencode }}", "a b", "a%20b"),
        ("{{ s | fromjson }}", '{"a": [1]}', {"a": [1]}),
        ("{{ s | items | list }}", {"a": 1}, [["a", 1]]),
        ("{{ '%03d' | format(s) }}", 4, "004"),
        ("{{ s.index(6) }}", [5, 6], 1),
    ],
)
def test_lists_and_scalars_behave_like_themselves(template: str, data: Any, value: Any) -> None:
    assert render(template, s=view(data)) == value


def test_envelope_of_a_failure() -> None:
    envelope = {"status": "error", "error": {"kind": "http", "message": "no", "status": 500}, "http": {"status": 500}}
    failed = ResultView(envelope, ReferenceCache())
    assert render("{{ s.error.kind }} {{ s.http.status }}", s=failed) == "http 500"
    assert render("{{ s }}", s=failed) == envelope
    assert render("{{ s.error }}", s=view({"a": 1}, error=None)) is None


def test_tasks_of_a_step() -> None:
    results = {"a": {"status": "ok", "data": {"n": 1}}, "b": {"status": "ok", "data": {"n": 2}}}
    step = view({"n": 2}, results=results)
    assert render("{{ s.results.a.n }} {{ s.results.b.data.n }} {{ s.n }}", s=step) == "1 2 2"


def test_result_of_a_loop() -> None:
    failure = {"status": "error", "error": {"kind": "python", "message": "x"}}
    envelope = {"status": "error", "data": [{"n": 1}, failure], "total": 2, "done": 1, "failed": 1}
    loop = ResultView(envelope, ReferenceCache())
    assert render("{{ s.total }}/{{ s.done }}/{{ s.failed }}", s=loop) == "2/1/1"
    assert render("{{ s.results[0].n }}", s=loop) == 1
    assert render("{{ s.results[1].error.kind }}", s=loop) == "python"
    assert render("{{ s.data | length }}", s=loop) == 2
    assert render("{{ s }}", s=loop) == {
        "results": [{"n": 1}, failure],
        "data": [{"n": 1}, failure],
        "status": "error",
        "total": 2,
        "done": 1,
        "failed": 1,
        "stats": {"total": 2, "succeeded": 1, "failed": 1, "skipped": 0},
    }
    assert render("{{ s.stats.succeeded }}", s=loop) == 1
    stopped = ResultView(envelope | {"total": 5}, ReferenceCache({}))
    assert render("{{ s.stats }}", s=stopped) == {"total": 5, "succeeded": 1, "failed": 1, "skipped": 3}
    assert [item["n"] for item in render("{{ s | selectattr('n', 'defined') }}", s=loop)] == [1]


def test_a_reference_is_needed_only_when_its_data_is_touched() -> None:
    for reference in (REFERENCE, REFERENCE.model_dump(mode="json")):
        stored = ResultView({"status": "ok", "ref": reference, "extracted": {"count": 3}}, ReferenceCache())
        assert render("{{ s.status }} {{ s.count }} {{ s.data.count }}", s=stored) == "ok 3 3"
        with pytest.raises(ReferenceNeeded) as needed:
            render("{{ s.rows }}", s=stored)
        assert needed.value.reference == REFERENCE


@pytest.mark.parametrize("data", [{"ref": REFERENCE}, {"data": {"page": 9, "paging": {"page": 4, "of": 6}}}])
def test_selected_fields_are_found_by_their_path_and_by_their_end(data: dict[str, Any]) -> None:
    extracted = {"data.paging.page": 4, "count": 3}
    view = ResultView({"status": "ok", "extracted": extracted, **data}, ReferenceCache())
    assert render("{{ s.page }} {{ s.data.paging.page }} {{ s.paging.page }} {{ s.data.count }}", s=view) == "4 4 4 3"


def test_inside_a_mapping_only_whole_paths_count() -> None:
    cache = ReferenceCache({REFERENCE.ref: {"page": {"total": 1, "paging": {"total": 5}}}})
    view = ResultView({"status": "ok", "ref": REFERENCE, "extracted": {"page.paging.total": 5}}, cache)
    assert render("{{ s.total }} {{ s.page.total }} {{ s.page.paging.total }}", s=view) == "5 1 5"


def test_beside_a_selected_field_the_rest_is_fetched() -> None:
    view = ResultView({"status": "ok", "ref": REFERENCE, "extracted": {"paging.page": 4}}, ReferenceCache())
    with pytest.raises(ReferenceNeeded) as needed:
        render("{{ s.paging.of }}", s=view)
    needed.value.cache[REFERENCE.ref] = {"paging": {"page": 4, "of": 6}}
    assert render("{{ s.paging.of }} {{ s.paging }}", s=view) == "6 {'page': 4, 'of': 6}"


def test_where_a_result_is_stored() -> None:
    stored = ResultView({"status": "ok", "ref": REFERENCE}, ReferenceCache())
    inline = ResultView({"status": "ok", "data": {"n": 1}}, ReferenceCache())
    assert render("{{ s._ref.ref }} {{ t._ref is defined }}", s=stored, t=inline) == f"{REFERENCE.ref} False"


async def test_a_reference_is_fetched_once() -> None:
    fetched: list[ResultRef] = []

    async def fetch(reference: ResultRef) -> Any:
        fetched.append(reference)
        return {"rows": [1, 2], "data": {"inner": 5}}

    cache = ReferenceCache()
    scope = {"s": ResultView({"status": "ok", "ref": REFERENCE}, cache), "t": ResultView({"ref": REFERENCE}, cache)}
    template = compile_value({"rows": "{{ s.rows }}", "n": "{{ s.data.inner }} {{ t.inner }}", "all": "{{ t }}"})
    rendered = await render_async(template, scope, fetch)
    assert rendered == {"rows": [1, 2], "n": "5 5", "all": {"rows": [1, 2], "data": {"inner": 5}}}
    assert fetched == [REFERENCE]


async def test_a_manifest_is_iterated_like_the_list_behind_it() -> None:
    async def fetch(reference: ResultRef) -> Any:
        return [{"n": 1}, {"n": 2}]

    loop = ResultView({"status": "ok", "ref": REFERENCE, "total": 2, "done": 2, "failed": 0}, ReferenceCache())
    template = compile_value("{% for item in s.results %}{{ item.n }}{% endfor %}{{ s.total }}")
    assert await render_async(template, {"s": loop}, fetch) == "122"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_a_whole_result_renders_to_its_data(data: Any) -> None:
    assert plain(view(data)) == data
    assert render("{{ s }}", s=view(data)) == data
    assert render({"deep": ["{{ [s] }}"]}, s=view(data)) == {"deep": [[data]]}
