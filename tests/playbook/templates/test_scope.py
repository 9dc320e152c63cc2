"""Names and their order, iterations, locals, and what ``set`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from noetl_dagster.errors import TemplateError, UndefinedNameError
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.templates.scope import Patch, Scope, compile_set, parse_target
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView

STEP = ResultView({"status": "ok", "data": {"n": 7}}, ReferenceCache())


def scope(**changes: Any) -> Scope:
    settings: dict[str, Any] = {"workload": {}, "ctx": {}, "steps": {"fetch": STEP}}
    return Scope(execution_id=42, **(settings | changes))


def render(template: Any, in_scope: Scope) -> Any:
    return compile_value(template).render(in_scope)


def test_names_of_an_execution() -> None:
    names = scope(workload={"region": "eu"}, ctx={"page": 2})
    template = "{{ workload.region }} {{ region }} {{ ctx.page }} {{ page }} {{ fetch.n }} {{ execution_id }}"
    assert render(template, names) == "eu eu 2 2 7 42"
    assert render("{{ job.id == job.uuid == job.execution_id == execution_id }}", names) is True
    assert render("{{ execution_id }}", names) == "42"


def test_order_of_bare_names() -> None:
    names = scope(steps={"x": "step"})
    assert render("{{ x }}", names) == "step"
    names = scope(steps={"x": "step"}, workload={"x": "workload"})
    assert render("{{ x }}", names) == "workload"
    names.ctx["x"] = "ctx"
    assert render("{{ x }}", names) == "ctx"
    names = names.with_input({"x": "input"})
    assert render("{{ x }}", names) == "input"
    names = names.with_iteration("x", "item", 0, 1)
    assert render("{{ x }}", names) == "item"
    names = names.with_locals({"x": "local"})
    assert render("{{ x }}", names) == "local"
    assert render("{{ ctx.x }} {{ workload.x }} {{ input.x }} {{ iter.x }}", names) == "ctx workload input item"


class Results(dict[str, Any]):
    """Results of steps, which know the step before and the tasks of earlier steps."""

    previous = "previous"

    def of_task(self, name: str) -> Any:
        return {"task": "of an earlier step"}.get(name)


def test_names_of_results_come_after_all_others() -> None:
    names = scope(steps=Results(fetch="step"))
    assert render("{{ result }} {{ fetch_result }} {{ task_result }}", names) == "previous step of an earlier step"
    assert render("{{ other_result is defined }} {{ _result is defined }}", names) == "False False"
    tasks = names.with_locals({"results": {"fetch": "task"}, "output": "output"})
    assert render("{{ result }} {{ fetch_result }}", tasks) == "output task"
    assert render("{{ fetch_result }}", names.with_locals({"results": "a column, not fetch"})) == "step"
    assert render("{{ fetch_result }} {{ result }}", tasks.with_input({"fetch_result": 1, "result": 2})) == "1 2"
    assert render("{{ fetch }}", names.with_fallbacks({"fetch": "output so far"})) == "output so far"
    assert render("{{ fetch }}", names.with_fallbacks({"fetch": 1}).with_input({"fetch": 2})) == 2
    with pytest.raises(UndefinedNameError):
        render("{{ result }}", scope())


def test_the_context_is_live() -> None:
    names = scope()
    inner = names.with_input({"a": 1})
    names.ctx["later"] = 3
    assert render("{{ later }} {{ a }}", inner) == "3 1"


def test_iterations() -> None:
    values: dict[str, Any] = {}
    names = scope().with_iteration("user", {"id": 5}, 1, 3, values)
    values["page"] = 9
    assert render("{{ user.id }} {{ iter.user.id }} {{ iter.page }} {{ page }} {{ iter.index }}", names) == "5 5 9 9 1"
    assert render("{{ [loop.index, loop.first, loop.last, loop.length, _index] }}", names) == [1, False, False, 3, 1]
    assert names.iteration is not None
    assert names.iteration.item == {"id": 5}


def test_nested_iterations_see_the_loop_around() -> None:
    outer = scope().with_iteration("city", "Oslo", 0, 2, {"seen": 1})
    inner = outer.with_iteration("hotel", "Grand", 4, None)
    assert render("{{ city }} {{ hotel }} {{ iter.parent.city }} {{ iter.parent.seen }}", inner) == "Oslo Grand Oslo 1"
    assert render("{{ iter.parent.parent }}", inner) is None
    assert render("{{ loop.last }}", inner) is None


def test_loop_names_exist_only_in_loops_or_as_locals() -> None:
    with pytest.raises(UndefinedNameError):
        render("{{ loop.index }}", scope())
    after = scope().with_locals({"loop": {"total": 3, "done": 2, "failed": 1}})
    assert render("{{ loop.failed > 0 }}", after) is True


def test_older_names_of_the_output() -> None:
    names = scope().with_locals({"output": STEP})
    assert render("{{ output.data.n }} {{ outcome.result.n }} {{ response.n }}", names) == "7 7 7"
    body = names.with_locals({"response": {"n": 8}})
    assert render("{{ response.n }}", body) == 8


def test_later_locals_win() -> None:
    names = scope().with_locals({"a": 1, "b": 1}).with_locals({"a": 2})
    assert render("{{ a }}{{ b }}", names) == "21"


def test_keychain_is_visible_only_where_it_is_given() -> None:
    with pytest.raises(UndefinedNameError):
        render("{{ keychain.api.token }}", scope())
    assert render("{{ keychain.api.token }}", scope().with_keychain({"api": {"token": "t"}})) == "t"


def test_own_names_beat_the_languages_where_playbooks_use_them() -> None:
    names = scope(workload={"job": "mine", "step": "also"})
    assert render("{{ job }} {{ step }}", names) == "mine also"
    assert render("{{ step.x }}", scope().with_step_values({"x": 1})) == 1


class LazySteps(Mapping[str, Any]):
    """Counts what is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.asked.append(name)
        return {"a": "result of a"}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def test_steps_are_asked_for_only_when_named() -> None:
    steps = LazySteps()
    names = scope(steps=steps, workload={"b": 1})
    assert render("{{ b }}", names) == 1
    assert steps.asked == []
    assert render("{{ a }}", names) == "result of a"
    assert steps.asked == ["a"]


def test_known_names_are_listed_in_errors() -> None:
    names = scope(workload={"region": 1}).with_iteration("user", 1, 0, 1, {"page": 1}).with_locals({"output": 1})
    assert {"region", "user", "page", "output", "fetch", "workload", "ctx", "iter", "loop"} <= set(names.known_names())
    assert set(names) == set(names.known_names())
    with pytest.raises(UndefinedNameError, match=r"'regoin' is undefined; known names: .*; did you mean 'region'\?"):
        render("{{ regoin }}", names)


def test_mapping_protocol() -> None:
    names = scope(workload={"a": 1})
    assert names["a"] == 1
    assert "a" in names
    assert "nope" not in names
    assert names.get("nope", 3) == 3
    assert dict(names)["a"] == 1


@pytest.mark.parametrize(
    ("name", "in_loop", "target"),
    [
        ("x", False, ("ctx", ("x",))),
        ("x", True, ("iter", ("x",))),
        ("ctx.x", True, ("ctx", ("x",))),
        ("iter.x.y", False, ("iter", ("x", "y"))),
        ("step.x", False, ("step", ("x",))),
        ("x.y", False, ("ctx", ("x", "y"))),
        ("ctx", False, ("ctx", ("ctx",))),
    ],
)
def test_targets(name: str, in_loop: bool, target: tuple[str, tuple[str, ...]]) -> None:
    assert parse_target(name, in_loop=in_loop) == target


@pytest.mark.parametrize("name", ["workload.x", "keychain.x", "", "ctx.", "a..b"])
def test_targets_that_are_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="set:"):
        parse_target(name, in_loop=False)


def test_patches_of_a_set_block() -> None:
    block = compile_set({"ctx.total": "{{ fetch.n + 1 }}", "page": 2, "iter.rows": "{{ fetch }}"}, in_loop=True)
    assert block
    assert block.names == {"fetch"}
    assert block.patches(scope()) == [
        Patch("ctx", ("total",), 8),
        Patch("iter", ("page",), 2),
        Patch("iter", ("rows",), {"n": 7}),
    ]
    assert not compile_set({}, in_loop=False)


def test_entries_of_a_set_block_do_not_see_each_other() -> None:
    names = scope(ctx={"a": 1})
    patches = compile_set({"a": "{{ a + 1 }}", "b": "{{ a }}"}, in_loop=False).patches(names)
    assert [patch.value for patch in patches] == [2, 1]


def test_patches_travel_as_json_and_copy_what_they_change() -> None:
    patch = Patch("ctx", ("a", "b"), [1])
    assert Patch.from_json(patch.as_json()) == patch
    shared = {"b": 0, "c": 1}
    ctx = {"a": shared}
    patch.apply(ctx)
    assert ctx == {"a": {"b": [1], "c": 1}}
    assert shared == {"b": 0, "c": 1}
    Patch("ctx", ("new", "deep"), 1).apply(ctx)
    assert ctx["new"] == {"deep": 1}


@pytest.mark.parametrize("pages", [10, 100, 1_000])
def test_what_grows_costs_what_is_new(pages: int) -> None:
    """Each page is copied once, however many there are: later lists share it."""
    values: dict[str, Any] = {"pages": [], "by_number": {}}
    block = compile_set(
        {
            "iter.pages": "{{ iter.pages + [output.data] }}",
            "iter.by_number": "{{ dict(iter.by_number, **{output.data.name: output.data}) }}",
        },
        in_loop=True,
    )
    copies: dict[int, Any] = {}
    for number in range(pages):
        page = {"name": f"p{number}", "rows": [{"n": number}]}
        turn = (
            scope()
            .with_iteration("item", 1, 0, 1, values)
            .with_locals({"output": ResultView({"status": "ok", "data": page}, ReferenceCache())})
        )
        for patch in block.patches(turn, turn.stored):
            patch.apply(values)
        assert values["pages"][-1] == page
        assert values["pages"][-1] is not page
        for stored in (*values["pages"], *values["by_number"].values()):
            copies[id(stored)] = stored  # held, so that no identity is used again
    assert [page["rows"][0]["n"] for page in values["pages"]] == list(range(pages))
    assert list(values["by_number"].values()) == values["pages"]
    assert len(copies) == 2 * pages


def test_values_that_are_put_together_are_copies() -> None:
    item = {"rows": [1]}
    values: dict[str, Any] = {"a": [[0]], "b": {"c": [1]}}
    turn = scope().with_iteration("item", item, 0, 1, values)
    block = compile_set(
        {"iter.a": "{{ [item] + iter.a }}", "iter.b": "{{ iter.b }}", "iter.c": "{{ iter.a + [item] }}"}, in_loop=True
    )
    first, same, other = (patch.value for patch in block.patches(turn, turn.stored))
    assert first == [item, [0]]
    assert first[0] is not item
    assert first[1] is values["a"][0]
    assert same is values["b"]
    assert other == [[0], item]
    assert other[0] is not values["a"][0]  # another target's value: it might be written by itself
