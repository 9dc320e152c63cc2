"""Values that override a workload: read and checked by the type of the default."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.cli.commands.run import _value_of
from noetl_dagster.errors import WorkloadError
from noetl_dagster.playbook.workload import check_types, unknown_keys

READ: list[tuple[Any, str, Any]] = [
    ("a", "00123", "00123"),
    ("a", "", ""),
    ("a", "null", "null"),
    ("a", "12:30", "12:30"),
    ("a", "[1, 2]", "[1, 2]"),
    ("a", "a: b # c", "a: b # c"),
    ("a", ' " ', ' " '),
    ("a", '"5"', "5"),
    ("a", '"a\\tb"', "a\tb"),
    ("a", '"a" or "b"', '"a" or "b"'),
    ("2026-01-31", "2026-02-01", "2026-02-01"),
    (1, "5", 5),
    (1, "-5", -5),
    (1.5, "1", 1),
    (1.5, "0.25", 0.25),
    (True, "no", False),
    ([1], "[2, 3]", [2, 3]),
    ({}, "{a: 1}", {"a": 1}),
    (None, "a", "a"),
    (None, "", None),
    (None, "0", 0),
    (None, "0.5", 0.5),
    ("{{ now() }}", "[1]", [1]),
]
"""Default, text after the equals sign, value."""

TRAPS: list[tuple[Any, str, str]] = [
    (None, "12:30", "YAML reads 12:30 as 750: colons mean base 60; quote it"),
    (None, "0123", "YAML reads 0123 as 83: a leading 0 means octal"),
    (None, "no", "YAML reads no as the boolean false"),
    (1, "010", "YAML reads 010 as 8"),
]

REFUSED: list[tuple[Any, Any, str]] = [
    ("a", 5, "workload.key is 5, but its default is text; write it in quotes, in a template {{ value | string }}"),
    ("a", None, "workload.key is nothing, but its default is text"),
    ("a", [1], "workload.key is a list, but"),
    (
        1,
        "5",
        "workload.key is the text '5', but its default is an integer; .* {{ value | int }}; or make the default null",
    ),
    (1, 1.0, "workload.key is 1.0, but its default is an integer"),
    (1, True, "workload.key is the boolean true, but"),
    (True, 1, "workload.key is 1, but its default is true or false"),
    (True, "no", "workload.key is the text 'no', but"),
    (1.5, "1", "but its default is a number"),
    (1.5, None, "workload.key is nothing, but its default is a number; write a number"),
    ([], "a", "workload.key is the text 'a', but its default is a list"),
    ([1, 2], [1, "a"], r"workload.key\[1\] is the text 'a', but its default is an integer"),
    (["a"], [1], r"workload.key\[0\] is 1, but its default is text"),
    ({"a": 1}, [], "workload.key is a list, but its default is a mapping"),
]
"""Default, value, error."""

ACCEPTED: list[tuple[Any, Any]] = [
    (None, 1),
    (None, "a"),
    ("{{ now() }}", 1),
    (1.5, 1),
    ([], [1, "a"]),
    ([1, "a"], [None]),
    (["{{ a }}"], [1]),
    ({"a": 1}, {"b": "x"}),
]


@pytest.mark.parametrize(("default", "text", "value"), READ)
def test_set_reads_by_the_type_of_the_default(default: Any, text: str, value: Any) -> None:
    read = _value_of("key", text, default)

    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(("default", "text", "message"), TRAPS)
def test_set_refuses_what_yaml_takes_for_another_value(
    default: Any, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _value_of("key", text, default)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("default", "value", "message"), REFUSED)
def test_a_value_of_another_type_is_refused(default: Any, value: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        check_types({"key": default}, {"key": value})


@pytest.mark.parametrize(("default", "value"), ACCEPTED)
def test_a_value_of_the_type_is_accepted(default: Any, value: Any) -> None:
    check_types({"key": default}, {"key": value, "other": object()})


def test_unknown_keys_are_warned_of() -> None:
    assert unknown_keys({"count": 1}, {"count": 2, "cuont": 3}) == [
        "the workload has no key 'cuont'; did you mean 'count'?"
    ]
    assert unknown_keys({}, {"any": 1}) == []
