"""Errors of PostgreSQL that pass by themselves, and those of a statement, which would come again."""

from __future__ import annotations

import asyncpg
import pytest

from noetl_dagster.events.connection import DATABASE_AWAY


@pytest.mark.parametrize(
    ("states", "passes"),
    [
        ("08000 08001 08003 08006 08P01", True),  # connections
        ("57P01 57P02 57P03 57P05 57014", True),  # shutdowns, and what an administrator ends
        ("53000 53100 53200 53300", True),  # disk, memory, connections
        ("58000 58030 25006 40001 40P01 55P03", True),
        ("42601 42703 42P01 42501 42883 0A000", False),  # the statement or its rights
        ("22001 22P02 23505 23502 21000 P0001 54000", False),  # its data
        ("28P01 3D000 XX000", False),  # what a start would have said
    ],
)
def test_only_errors_that_pass_by_themselves_are_waited_for(states: str, passes: bool) -> None:
    errors = [asyncpg.PostgresError.new({"C": state, "M": "m"}) for state in states.split()]
    assert [isinstance(error, DATABASE_AWAY) for error in errors] == [passes] * len(errors)
