"""Playbooks for the reference interpreter: made by hypothesis, each written in one of many ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import yaml
from hypothesis import strategies as st

from .reference import Arc, Loop, OnFailure, Reference, Step, Sum, Test


@dataclass(frozen=True)
class Words:
    """One way of writing a playbook, of those that mean the same.

    Attributes:
        older: the words of the seeds.
        returns: code ends with ``return``.
        braces: code takes its values from templates in it, not from ``input``.
        below: the tool's fields stand below its ``spec``.
        kept: every result is selected from, and stored above a size that none has.
        settled: settings are templates over ctx and workload.
    """

    older: bool
    returns: bool
    braces: bool
    below: bool
    kept: bool
    settled: bool


WORDS = st.builds(Words, *[st.booleans()] * 6)
SMALL = st.integers(-2, 6)
LIMIT = st.integers(-6, 3)
ONE_IN_FOUR = st.sampled_from((False, False, False, True))


@st.composite
def playbooks(draw: st.DrawFn) -> tuple[Step, ...]:
    """Steps with arcs forward, so that joins come about; some with one arc back, so that cycles do."""
    count = draw(st.sampled_from((1, 3, 4, 5, 6, 7, 8)))
    targets = [draw(_targets(number, count)) for number in range(count)]
    steps = tuple(draw(_steps(number, targets)) for number in range(count))
    return _with_cycle(steps, draw) or steps


def _targets(number: int, count: int) -> st.SearchStrategy[list[int]]:
    if number + 1 == count:
        return st.just([])
    return st.lists(st.integers(number + 1, count - 1), min_size=1, max_size=3, unique=True)


def _before(number: int, targets: list[list[int]]) -> tuple[str, ...]:
    """Steps that have ended for certain, or never run, when this one is entered."""
    found: set[int] = set()
    for source in range(number - 1, -1, -1):
        if number in targets[source] or found & set(targets[source]):
            found.add(source)
    return tuple(f"s{source}" for source in sorted(found))


@st.composite
def _steps(draw: st.DrawFn, number: int, targets: list[list[int]]) -> Step:
    known = _before(number, targets)
    kind = draw(st.sampled_from(("number", "number", "flaky", "loop")))
    return Step(
        name=f"s{number}",
        sum=draw(_sums(known)),
        loop=draw(_loops()) if kind == "loop" else None,
        failures=draw(st.integers(0, 3)) if kind == "flaky" else 0,
        attempts=draw(st.integers(1, 3)) if kind == "flaky" else 1,
        admit=draw(_tests(known)) if number and draw(ONE_IN_FOUR) else None,
        set=draw(st.none() | _sums(known, output=True)),
        arcs=tuple(draw(_arcs(f"s{target}", known)) for target in targets[number]),
        inclusive=not draw(ONE_IN_FOUR),
    )


@st.composite
def _sums(draw: st.DrawFn, known: tuple[str, ...], *, output: bool = False) -> Sum:
    names = draw(st.lists(st.sampled_from(known), max_size=2, unique=True)) if known else []
    return Sum(draw(SMALL), tuple(names), output and draw(st.booleans()))


@st.composite
def _tests(draw: st.DrawFn, known: tuple[str, ...], *, output: bool = False) -> Test:
    return Test(draw(_sums(known, output=output)), draw(LIMIT), draw(ONE_IN_FOUR))


@st.composite
def _arcs(draw: st.DrawFn, target: str, known: tuple[str, ...]) -> Arc:
    when = draw(st.none() | st.none() | st.just(OnFailure()) | _tests(known, output=True))
    return Arc(target, when, draw(st.none() | _sums(known)))


@st.composite
def _loops(draw: st.DrawFn) -> Loop:
    items = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    failing = frozenset(draw(st.sets(st.integers(0, 9), max_size=2))) if draw(st.booleans()) else frozenset()
    return Loop(items, draw(st.booleans()), failing, draw(st.booleans()))


def _with_cycle(steps: tuple[Step, ...], draw: st.DrawFn) -> tuple[Step, ...] | None:
    """One arc back, taken while a counter that only its own source moves is small.

    A cycle is entered at one step here: tokens that branches bring to several steps of a cycle come in no
    fixed order.
    """
    rounds = draw(st.integers(0, 2))
    pairs = [(first, last) for last in range(len(steps)) for first in range(last + 1)]
    if not rounds:
        return None
    looped = (_back(steps, first, last, rounds) for first, last in draw(st.permutations(pairs)))
    return next((found for found in looped if found is not None), None)


def _back(steps: tuple[Step, ...], first: int, last: int, rounds: int) -> tuple[Step, ...] | None:
    source, entry = steps[last], steps[first].name
    counter = Sum(0, (f"{source.name}_0",))
    back = Arc(entry, _Below(Test(counter, rounds - 1)), replace(counter, constant=1))
    changed = (*steps[:last], replace(source, arcs=(back, *source.arcs)), *steps[last + 1 :])
    inside = next(set(group) for group in Reference(changed).regions() if source.name in group)
    entries = {changed[0].name} & inside
    for step in changed:
        if step.name not in inside:
            entries.update(arc.target for arc in step.arcs if arc.target in inside)
    return changed if entries == {entry} else None


class _Below(Test):
    """Whether the sum is not above the limit."""

    def __init__(self, test: Test) -> None:
        super().__init__(test.sum, test.limit)

    def holds(self, ctx: Any, output: int | None = None) -> bool:
        return not super().holds(ctx, output)


def as_yaml(steps: tuple[Step, ...], words: Words) -> str:
    """The playbook's text."""
    document = {
        "apiVersion": "noetl.io/v2",
        "kind": "Playbook",
        "metadata": {"name": "generated", "path": "tests/generated"},
        "workload": {"width": 3, "tolerant": True},
        "workflow": [_step(step, words) for step in steps],
    }
    return yaml.safe_dump(document, sort_keys=False)


def _step(step: Step, words: Words) -> dict[str, Any]:
    older = words.older
    written: dict[str, Any] = {"step": step.name, "tool": _tool(step, words)}
    if step.loop is not None:
        mode = "parallel" if step.loop.parallel else "sequential"
        items = list(step.loop.items)
        width = "{{ ctx.none_yet | default(workload.width) }}" if words.settled else 3
        written["loop"] = (
            {"collection": items, "element": "item", "mode": mode, "concurrency": width}
            if older
            else {"in": items, "iterator": "item", "spec": {"mode": mode, "max_in_flight": width}}
        )
        partial = step.loop.allow_partial
        written["spec"] = {"allow_partial": _template(f"workload.tolerant == {partial}") if words.settled else partial}
    if step.admit is not None:
        written.setdefault("spec", {})["policy"] = {"admit": _test(step.admit, "0")}
    output = "output.done" if step.loop else "output.data"
    if step.set is not None:
        block, prefix = ("vars", "") if older else ("set", "ctx.")
        written[block] = {f"{prefix}{step.name}": _template(_sum(step.set, output))}
    if words.kept:
        kept = {"strategy": "size_threshold", "threshold_kb": 64}
        written["output"] = {"output_select": kept, "store": {"kind": "auto"}}
    arcs = [_arc(step, place, arc, output, older) for place, arc in enumerate(step.arcs)]
    if arcs:
        mode = "inclusive" if step.inclusive else "exclusive"
        as_list = older and any(arc.when for arc in step.arcs) and not step.inclusive
        written["next"] = arcs if as_list else {"spec": {"mode": mode}, "arcs": arcs}
    return written


def _tool(step: Step, words: Words) -> dict[str, Any]:
    older = words.older
    given = {"value": _template(_sum(step.sum, "0")), "attempt": "{{ _attempt }}"}
    if step.loop is not None:
        given["item"] = "{{ item }}"
    fields = {"code": _code(step, words, given if words.braces else {name: name for name in given})}
    if not words.braces:
        fields["args" if older else "input"] = given
    spec: dict[str, Any] = fields if words.below else {}
    if step.attempts > 1:
        attempts = f"{{{{ ctx.none_yet | default({step.attempts}) }}}}" if words.settled else step.attempts
        retry = {"do": "retry", "attempts": attempts, "delay": 0}
        when = "outcome.status == 'error'" if older else "output.status == 'error'"
        spec["policy"] = {"rules": [{"when": _template(when), "then": retry}]}
    tool: dict[str, Any] = {"kind": "python"} | ({} if words.below else fields)
    if spec:
        tool["spec"] = spec
    if step.loop is not None:
        collected = f"ctx.{step.name}_all"
        tool["set"] = {
            f"ctx.{step.name}_last": "{{ output.data }}",
            collected: _template(f"{collected} | default([]) + [output.data]"),
        }
    return tool


def _code(step: Step, words: Words, names: dict[str, str]) -> str:
    """What the step does; ``names`` are expressions of what it is given."""
    result = names["value"] if step.loop is None else f"{names['value']} + {names['item']}"
    code = f"return {result}" if words.returns else f"result = {result}"
    if step.failures:
        return f"if {names['attempt']} <= {step.failures}:\n    raise RuntimeError('not yet')\n{code}"
    if step.loop is not None:
        failing = sorted(step.loop.failing)
        return f"if {names['item']} in {failing}:\n    raise RuntimeError('no')\n{code}"
    return code


def _arc(step: Step, place: int, arc: Arc, output: str, older: bool) -> dict[str, Any]:
    written: dict[str, Any] = {"step": arc.target}
    if isinstance(arc.when, OnFailure):
        written["when"] = "{{ event.name == 'step.failed' }}"
    elif arc.when is not None:
        written["cond" if older else "when"] = _test(arc.when, output)
    if arc.set is not None:
        block, prefix = ("set_ctx", "") if older else ("set", "ctx.")
        written[block] = {f"{prefix}{step.name}_{place}": _template(_sum(arc.set, "0"))}
    return written


def _test(test: Test, output: str) -> str:
    if isinstance(test, _Below):
        return _template(f"{_sum(test.sum, output)} <= {test.limit}")
    if test.divides:
        return _template(f"({_sum(test.sum, output)}) % {abs(test.limit) + 1} == 0")
    return _template(f"{_sum(test.sum, output)} > {test.limit}")


def _sum(sum: Sum, output: str) -> str:
    parts = [str(sum.constant), *(f"(ctx.{name} | default(0))" for name in sum.names)]
    return " + ".join([*parts, output] if sum.output else parts)


def _template(expression: str) -> str:
    return f"{{{{ {expression} }}}}"
