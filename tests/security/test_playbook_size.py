"""Small texts that stand for huge or deep values are refused with their line, before they cost time or memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.loader import parse_report
from tests.playbook.playbooks import HEAD

LINE = HEAD.count("\n") + 1
STEPS = "workflow: [{step: start, tool: {kind: noop}}]\n"


def doubled(times: int, form: str = "[*{0}, *{0}]") -> str:
    """Lines that each repeat the line before twice."""
    lines = ["  a0: &a0 [x, y]"]
    lines += [f"  a{number}: &a{number} " + form.format(f"a{number - 1}") for number in range(1, times)]
    return "\n".join(lines) + "\n"


def input_of(text: str) -> str:
    return "workflow:\n- step: start\n  tool: {kind: noop}\n  input:\n" + text.replace("  a", "    a")


DEPTH, VALUES, BYTES = "nested deeper than 100 levels", "more than 200,000 values", "NOETL_PLAYBOOK_BYTES"

ATTACKS = {
    "brackets": ("workload: " + "[" * 30_000, DEPTH),
    "braces": ("workload: " + "{a: " * 30_000, DEPTH),
    "dashes": ("workload:\n  " + "- " * 30_000 + "x", DEPTH),
    "keys": ("workload: " + "{? " * 30_000, DEPTH),
    "aliases in workload": ("workload:\n" + doubled(30) + STEPS, VALUES),
    "aliases in input": (input_of(doubled(30)), VALUES),
    "merges": ("workload:\n" + doubled(60, "{{<<: {{p: *{0}, q: *{0}}}}}") + STEPS, VALUES),
    "aliases of aliases": ("workload:\n" + doubled(150, "[*{0}]") + STEPS, DEPTH),
    "an alias in itself": ("workload: &a {b: [*a]}\n" + STEPS, DEPTH),
    "many values": ("workload: [" + "[]," * 300_000 + "]\n" + STEPS, VALUES),
    "many aliases": ("workload:\n  a: &a x\n  b: [" + "*a," * 300_000 + "]\n" + STEPS, VALUES),
    "long text repeated": (f"workload:\n  a: &a {'x' * 100_000}\n  b: [{'*a,' * 100}]\n" + STEPS, BYTES),
    "long key repeated": (f"workload:\n  a: &a {{? {'x' * 100_000} : 1}}\n  b: [{'*a,' * 100}]\n" + STEPS, BYTES),
    "long text": (f"workload:\n  a: {'x' * 5_000_000}\n" + STEPS, BYTES),
}


def test_reading_ends_where_there_are_too_many_values() -> None:
    _, [problem] = parse_report(HEAD + "workload: [" + "1," * 300_000 + "1]\n")
    assert 390_000 < problem.place.column < 400_100  # the rest has cost nothing


@pytest.mark.parametrize(("text", "limit"), ATTACKS.values(), ids=ATTACKS)
def test_what_stands_for_too_much_is_refused(text: str, limit: str) -> None:
    playbook, problems = parse_report(HEAD + text, file="x.yaml")
    assert playbook is None
    [problem] = [problem for problem in problems if limit in problem.message]
    assert problem.place.line == 1 if len(text) > 4_500_000 else problem.place.line >= LINE


def test_the_line_is_the_first_that_is_too_much() -> None:
    problem = parse_report(HEAD + "workload:\n" + doubled(30) + STEPS)[1][0]
    assert problem.place.line == LINE + 16  # a15 has 2**17 values; with those of the lines before more than 200,000


@pytest.mark.parametrize(
    "value", ["9" * 5000, "0x" + "f" * 5000, "1" + ":0" * 3000, "1." + "0" * 5000, "!!bool maybe", "!!int ''"]
)
def test_scalars_that_are_no_values_are_problems(value: str) -> None:
    playbook, problems = parse_report(HEAD + f"workload: {{a: {value}}}\n" + STEPS)
    assert playbook is None
    assert "quote it" in problems[0].message


def test_ordinary_aliases_and_merges_are_kept() -> None:
    text = "base: &base {a: [1, 2]}\nnext: {<<: *base, b: *base}\n"
    assert Document(text, "x.yaml").root["next"] == {"a": [1, 2], "b": {"a": [1, 2]}}


def test_memory_of_the_largest_playbook(tmp_path: Path) -> None:
    """The worst text within the limits needs less than the memory that a checking process has."""
    path = tmp_path / "large.yaml"
    path.write_text(HEAD + "workload:\n  a: [" + "[]," * 190_000 + "]\n" + STEPS)
    code = (
        "import sys, resource; from noetl_dagster.playbook.loader import load_report; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; load_report(sys.argv[1]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 384 * 1024**2
