"""The logs of every process: as text for people, or as JSON lines for machines, with the fields of what logs.

structlog formats the JSON, since Dagster depends on it already. The fields of a line (execution, step, command, run)
come from a context variable, which follows tasks and threads. So no logger is passed around.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from contextvars import Context, ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any

import orjson

from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import LogFormat, Settings

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

logger = logging.getLogger(__name__)

TEXT = "%(levelname)s %(name)s: %(message)s"

_fields: ContextVar[Mapping[str, Any]] = ContextVar("log_context", default={})  # noqa: B039, never written to


class LogContext:
    """Adds fields to the log lines of a ``with`` block, including those of threads and tasks started within it.

    Tasks that outlive the block start with :func:`without_fields` instead.
    """

    __slots__ = ("_added", "_token")

    def __init__(
        self,
        *,
        execution_id: int | None = None,
        step: str | None = None,
        command_id: str | None = None,
        **more: str,
    ) -> None:
        # None removes a field: the steps of a child playbook do not belong to the command that runs the child
        own = {"execution_id": execution_id, "step": step, "command_id": command_id}
        self._added: dict[str, Any] = {**own, **more}

    def __enter__(self) -> None:
        self._token: Token[Mapping[str, Any]] = _fields.set({**_fields.get(), **self._added})

    def __exit__(self, *exc: object) -> None:
        _fields.reset(self._token)


def current_fields() -> Mapping[str, Any]:
    """Returns the fields that a line logged here and now carries."""
    return _fields.get()


def without_fields() -> Context:
    """Returns a context without fields, for a task that serves the whole process."""
    return Context()


def set_up(settings: Settings) -> None:
    """Configures logging to standard error according to the settings. Lines have no secrets of the settings.

    Does nothing if the root logger has a handler already: then the surrounding program has configured logging.
    """
    SECRETS.hide_settings(settings)
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.addFilter(_has_no_handler)
    root.setLevel(settings.log_level)
    if settings.log_format is LogFormat.JSON:
        handler.setFormatter(_json_formatter())
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread
    else:
        handler.setFormatter(logging.Formatter(TEXT))
        sys.excepthook = _show_uncaught
        threading.excepthook = _show_uncaught_of_thread
    root.addHandler(handler)


def _has_no_handler(record: logging.LogRecord) -> bool:
    """Returns False for lines of a library that has its own handlers, such as Dagster's servers."""
    return not logging.getLogger(record.name.partition(".")[0]).handlers


def _json_formatter() -> logging.Formatter:
    """Omits ``extra`` fields and local variables of tracebacks, because they may contain secrets."""
    import structlog  # its import takes 0.1 s, which text output does not need

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            _add_context,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("message"),
            _render,
        ],
    )


def _add_context(_: WrappedLogger, method: str, line: EventDict) -> EventDict:
    return {**current_fields(), **line}


def _render(_: WrappedLogger, method: str, line: EventDict) -> str:
    """Drops empty fields, and renders identifiers as text because JSON numbers cannot hold them."""
    if (execution_id := line.get("execution_id")) is not None:
        line["execution_id"] = str(execution_id)
    fields = {name: value for name, value in line.items() if value is not None}
    return orjson.dumps(fields, default=str).decode()


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    SECRETS.redact_error(error)
    sys.__excepthook__(kind, error, trace)


def _show_uncaught_of_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None:
        SECRETS.redact_error(failure.exc_value)
    threading.__excepthook__(failure)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("%s: the process ends", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_of_thread(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread is not None else "unknown"
    error = failure.exc_value or failure.exc_type()
    logger.critical("thread %s ends", name, exc_info=(failure.exc_type, error, failure.exc_traceback))
