"""Built-in checks of the rows of a result, which DuckDB evaluates in place.

All checks of one result are evaluated in one pass; a failed check reports a few of the rows that fail it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import duckdb

from noetl_dagster.playbook.assets import CheckKind, CheckSpec, CheckVerdict
from noetl_dagster.playbook.templates.environment import sql_literal
from noetl_dagster.playbook.wording import suggestion
from noetl_dagster.settings import Settings
from noetl_dagster.tools.sql.tables import listed, quoted
from noetl_dagster.tools.sql.views import NoRowsError, RowsSource, create_view, mount_object_storage
from noetl_dagster.values import admit

EXAMPLES = 5
LEADING = 3
CELL_CHARACTERS = 100
_VIEW = "result"


@dataclass(frozen=True, slots=True)
class _Question:
    """SQL of one check.

    Attributes:
        counts: expressions over all rows, whose values decide.
        bad: condition of the rows that fail it, or a whole statement; None if the check is not about single rows.
        about: columns of the check.
        decide: returns the answer for the values of ``counts``.
    """

    counts: tuple[str, ...]
    decide: Callable[[Sequence[Any]], CheckVerdict]
    bad: str | None = None
    about: tuple[str, ...] = ()


async def answers(checks: Sequence[CheckSpec], source: RowsSource | None, settings: Settings) -> list[CheckVerdict]:
    """Returns the answer to each of the built-in checks, in order; raises ``NoetlError`` if the rows cannot be read.

    Args:
        source: the rows; None if there are none at all, and so no columns either.
    """
    if source is None:
        return [_answer_without_rows(check) for check in checks]
    try:
        return await asyncio.to_thread(_answers, checks, source, settings)
    except duckdb.Error as error:
        raise NoRowsError(f"the rows cannot be read: {error}") from error


def _answer_without_rows(check: CheckSpec) -> CheckVerdict:
    """Returns the answer for a result without rows: too few rows, or none that could fail."""
    question = _QUESTIONS[check.kind](check.asks)
    nothing = None if check.kind is CheckKind.FRESH else 0
    answer = question.decide([nothing for _ in question.counts])
    return CheckVerdict(answer.passed, answer.why, {"rows": 0, **answer.facts})


def _answers(checks: Sequence[CheckSpec], source: RowsSource, settings: Settings) -> list[CheckVerdict]:
    with closing(duckdb.connect()) as connection:
        mount_object_storage(connection, settings)
        create_view(connection, settings, _VIEW, source)
        described = connection.execute(f"DESCRIBE {_VIEW}").fetchall()
        columns = tuple(str(row[0]) for row in described)
        questions = [_question(check, columns) for check in checks]
        wanted = [count for one in questions if isinstance(one, _Question) for count in one.counts]
        row = connection.execute(f"SELECT {', '.join(['count(*)', *wanted])} FROM {_VIEW}").fetchone()
        assert row is not None
        total, numbers = row[0], iter(row[1:])
        verdicts = []
        for question in questions:
            if isinstance(question, CheckVerdict):
                verdicts.append(question)
                continue
            answer = question.decide([next(numbers) for _ in question.counts])
            facts = {"rows": total, **answer.facts}
            if not answer.passed and question.bad is not None:
                facts["examples"] = _rows(connection, question.bad, columns, question.about)
            verdicts.append(CheckVerdict(answer.passed, answer.why, facts))
        return verdicts


def _question(check: CheckSpec, columns: tuple[str, ...]) -> _Question | CheckVerdict:
    """Returns the SQL of a check; the answer if it names a column that does not exist."""
    named = () if check.kind is CheckKind.ROW_COUNT else tuple(check.asks)
    for name in named:
        if name not in columns:
            return CheckVerdict(False, f"the result has no column {name!r}; {suggestion(name, columns, 'columns')}")
    return _QUESTIONS[check.kind](check.asks)


def _unique(columns: Sequence[str]) -> _Question:
    names = listed(columns)

    def decide(values: Sequence[Any]) -> CheckVerdict:
        why = f"{values[0]} rows repeat {', '.join(columns)}" if values[0] else ""
        return CheckVerdict(not values[0], why, {"duplicates": values[0]})

    return _Question(
        (f"count(*) - count(DISTINCT row({names}))",),
        decide,
        f"SELECT {names}, count(*) AS times FROM {_VIEW} GROUP BY ALL HAVING count(*) > 1 ORDER BY times DESC",
    )


def _not_null(columns: Sequence[str]) -> _Question:
    return _by_column({name: f"{quoted(name)} IS NULL" for name in columns}, "without", "nulls")


def _accepted(asks: dict[str, Sequence[Any]]) -> _Question:
    """Accepts null: ``not_null`` is a check of its own."""
    bad = {}
    for name, values in asks.items():
        column, accepted = _comparable(name, values)
        other = f"{column} IS NULL OR {column} NOT IN ({', '.join(accepted)})" if accepted else "true"
        bad[name] = f"{quoted(name)} IS NOT NULL AND ({other})"
    return _by_column(bad, "with another", "others")


def _between(asks: dict[str, Sequence[Any]]) -> _Question:
    bad = {}
    for name, bounds in asks.items():
        column, limits = _comparable(name, bounds)
        signs = (sign for sign, bound in zip("<>", bounds, strict=True) if bound is not None)
        beyond = (f"{column} {sign} {bound}" for sign, bound in zip(signs, limits, strict=True))
        bad[name] = f"{quoted(name)} IS NOT NULL AND ({' OR '.join([f'{column} IS NULL', *beyond])})"
    return _by_column(bad, "beyond in", "outside")


def _row_count(asks: Sequence[int | None]) -> _Question:
    lowest, highest = asks
    wanted = " to ".join(str(bound) for bound in (lowest, highest) if bound is not None)
    at = "at least " if highest is None else "at most " if lowest is None else ""

    def decide(values: Sequence[Any]) -> CheckVerdict:
        number = values[0]
        passed = (lowest is None or number >= lowest) and (highest is None or number <= highest)
        return CheckVerdict(passed, "" if passed else f"{number} rows, wanted {at}{wanted}")

    return _Question(("count(*)",), decide)


def _fresh(asks: dict[str, float]) -> _Question:
    newest = tuple(f"epoch(max(TRY_CAST(CAST({quoted(name)} AS VARCHAR) AS TIMESTAMPTZ)))" for name in asks)

    def decide(values: Sequence[Any]) -> CheckVerdict:
        now = datetime.now(UTC).timestamp()
        facts, late = {}, []
        for (name, limit), moment in zip(asks.items(), values, strict=True):
            if moment is None:
                late.append(f"{name} holds no time")
                continue
            facts[f"newest {name}"] = datetime.fromtimestamp(moment, UTC).isoformat()
            if now - moment > limit:
                late.append(f"the newest {name} is {now - moment:.0f} s old, wanted {limit:.0f} s at most")
        return CheckVerdict(not late, "; ".join(late), facts)

    return _Question(newest, decide)


def _by_column(bad: dict[str, str], word: str, fact: str) -> _Question:
    """Counts the rows that fail for each of several columns."""

    def decide(values: Sequence[Any]) -> CheckVerdict:
        counts = {name: number for name, number in zip(bad, values, strict=True) if number}
        text = ", ".join(f"{number} rows {word} {name}" for name, number in counts.items())
        return CheckVerdict(not counts, text, {fact: sum(counts.values())})

    return _Question(
        tuple(f"count(*) FILTER (WHERE {condition})" for condition in bad.values()),
        decide,
        " OR ".join(f"({condition})" for condition in bad.values()),
        tuple(bad),
    )


def _comparable(name: str, values: Sequence[Any]) -> tuple[str, list[str]]:
    """Returns a column and the values that are not null, in one type: as numbers if all values are, else as text."""
    constants = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in constants):
        return f"TRY_CAST({quoted(name)} AS DOUBLE)", [repr(float(value)) for value in constants]
    texts = (str(value).lower() if isinstance(value, bool) else str(value) for value in constants)
    return f"TRY_CAST({quoted(name)} AS VARCHAR)", [str(sql_literal(text)) for text in texts]


def _rows(
    connection: duckdb.DuckDBPyConnection, bad: str, columns: Sequence[str], about: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns a few rows that fail: the columns of the check, and the first columns, which identify a row."""
    shown = dict.fromkeys((*columns[:LEADING], *about))
    select = f"SELECT {listed(shown)} FROM {_VIEW} WHERE {bad}" if about else bad
    cursor = connection.execute(f"{select} LIMIT {EXAMPLES}")
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, map(_cell, row), strict=True)) for row in cursor.fetchall()]


def _cell(value: Any) -> Any:
    """Returns a value of an example, cut if it is long."""
    plain = admit(value)
    if plain is None or isinstance(plain, bool | int | float):
        return plain
    text = plain if isinstance(plain, str) else str(plain)
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"


_QUESTIONS: dict[CheckKind, Callable[[Any], _Question]] = {
    CheckKind.UNIQUE: _unique,
    CheckKind.NOT_NULL: _not_null,
    CheckKind.ACCEPTED: _accepted,
    CheckKind.BETWEEN: _between,
    CheckKind.ROW_COUNT: _row_count,
    CheckKind.FRESH: _fresh,
}
