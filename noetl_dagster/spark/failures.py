"""Shortens Spark's failures to a few lines, without the Java stack."""

from __future__ import annotations

import re
from dataclasses import dataclass

from noetl_dagster.errors import ErrorKind

LONGEST_MESSAGE = 1500
_REMOTE_TRACEBACK = "Traceback (most recent call last):"
_JAVA_FRAME = re.compile(r"^\s*(at [\w$.]+\(|\.\.\. \d+ more)")
_PLAN = re.compile(r"^(== \w+|;$|'?[+:\-| ]*'?[A-Z]\w+ .*#\d+)")

_UNFIT = frozenset({"AnalysisException", "ParseException"})

LOST = (
    "ExecutorLostFailure",
    "Lost executor",
    "Answer from Java side is empty",
    "Connection refused",
    "Connection reset",
    "SparkContext was shut down",
    "SparkContext is stopped",
    "stopped SparkContext",
    "FetchFailed",
    "Python worker exited unexpectedly",
    "UNAVAILABLE",
)
"""Texts of failures that another attempt, on another executor or in a new session, may avoid."""


@dataclass(frozen=True, slots=True)
class SparkFailure:
    """A failure of Spark.

    Attributes:
        message: at most ``LONGEST_MESSAGE`` characters.
        code: Spark's error condition, for example ``UNRESOLVED_COLUMN.WITH_SUGGESTION``.
        retryable: an executor, the JVM or the connection was lost.
        kind: ``connection`` for those, ``python`` for exceptions of a Python worker, ``schema`` for a query that does
            not fit its tables, else ``transform``.
    """

    message: str
    code: str | None = None
    retryable: bool = False
    kind: ErrorKind = "transform"


def failure_of(error: BaseException) -> SparkFailure:
    """Returns the failure behind an exception of PySpark or py4j."""
    text = str(error)
    condition = getattr(error, "getCondition", None) or getattr(error, "getErrorClass", None)
    return SparkFailure(
        message=_essence(error, text),
        code=condition() if condition is not None else None,
        retryable=is_lost(error),
        kind=_kind_of(error, text),
    )


def _kind_of(error: BaseException, text: str) -> ErrorKind:
    if is_lost(error):
        return "connection"
    if type(error).__name__ in _UNFIT:
        return "schema"
    return "python" if _REMOTE_TRACEBACK in text else "transform"


def is_lost(error: BaseException) -> bool:
    """Reports whether an executor, the JVM or the connection was lost."""
    kind = type(error).__name__
    return kind in ("Py4JNetworkError", "ConnectionRefusedError", "ConnectionResetError", "EOFError") or any(
        words in str(error) for words in LOST
    )


def _essence(error: BaseException, text: str) -> str:
    """Returns the Python error of a worker if there is one, else Spark's message up to the plan or stack."""
    _, found, traceback = text.rpartition(_REMOTE_TRACEBACK)
    if found:
        return _python_error(traceback)[:LONGEST_MESSAGE]
    kept: list[str] = []
    for line in text.splitlines():
        if _JAVA_FRAME.match(line) or _PLAN.match(line):
            break
        if line.strip():
            kept.append(line.strip())
    return (" ".join(kept) or type(error).__name__)[:LONGEST_MESSAGE]


def _python_error(traceback: str) -> str:
    """Returns the exception of a Python traceback and the place that raised it."""
    lines = []
    for line in traceback.splitlines():
        if _JAVA_FRAME.match(line) or line.startswith(("Driver stacktrace", " SQLSTATE", "JVM stacktrace")):
            break
        if line.strip():
            lines.append(line)
    places = [line.strip() for line in lines if line.startswith("  File ")]
    error = [line.strip() for line in lines if not line.startswith(" ")]
    where = f" ({places[-1]})" if places else ""
    return f"{' '.join(error)}{where}"
