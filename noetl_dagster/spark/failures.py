"""Shortens Spark's failures to a few lines, without the Java stack."""

from __future__ import annotations

import re
from dataclasses import dataclass

from noetl_dagster.errors import ErrorKind
from noetl_dagster.process.redaction import SECRETS

LONGEST_MESSAGE = 1500
_REMOTE_TRACEBACK = "Traceback (most recent call last):"
_JAVA_FRAME = re.compile(r"^\s*(at [\w$.]+\(|\.\.\. \d+ more)")
_PLAN = re.compile(r"^(== \w+|;$|'?[+:\-| ]*'?[A-Z]\w+ .*#\d+)")

_LOST_TYPES = ("Py4JNetworkError", "ConnectionRefusedError", "ConnectionResetError", "EOFError")
_LOST = (
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
    text, name = str(error), type(error).__name__
    condition = getattr(error, "getCondition", None) or getattr(error, "getErrorClass", None)
    _, is_python, traceback = text.rpartition(_REMOTE_TRACEBACK)
    kind: ErrorKind = "python" if is_python else "transform"
    if name in ("AnalysisException", "ParseException"):
        kind = "schema"
    if name in _LOST_TYPES or any(words in text for words in _LOST):
        kind = "connection"
    message = _python_error(traceback) if is_python else _spark_error(text)
    return SparkFailure(
        message=SECRETS.redact(message or name)[:LONGEST_MESSAGE],
        code=condition() if condition is not None else None,
        retryable=kind == "connection",
        kind=kind,
    )


def _spark_error(text: str) -> str:
    """Returns Spark's message up to the plan or stack."""
    lines_kept: list[str] = []
    for line in text.splitlines():
        if _JAVA_FRAME.match(line) or _PLAN.match(line):
            break
        if line.strip():
            lines_kept.append(line.strip())
    return " ".join(lines_kept)


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
