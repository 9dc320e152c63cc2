"""Logs of every process: set up in one place, as text for people or as JSON lines for machines.

structlog, because Dagster, which every process has, formats its own JSON with it. What a line is about is in a context
variable (:mod:`noetl_dagster.process.about`): no logger need be passed on.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import orjson

from noetl_dagster.process import about
from noetl_dagster.settings import LogFormat, Settings

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

logger = logging.getLogger(__name__)

TEXT = "%(levelname)s %(name)s: %(message)s"


def set_up(settings: Settings) -> None:
    """Has this process log as the settings say, on standard error.

    A process whose root logger has a handler already is somebody else's, who has decided.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.addFilter(_is_unwritten)
    root.setLevel(settings.log_level)
    if settings.log_format is LogFormat.JSON:
        handler.setFormatter(_json_formatter())
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread
    else:
        handler.setFormatter(logging.Formatter(TEXT))
    root.addHandler(handler)


def _is_unwritten(record: logging.LogRecord) -> bool:
    """False for the lines of a library that writes them itself, as Dagster's servers do."""
    return not logging.getLogger(record.name.partition(".")[0]).handlers


def _json_formatter() -> logging.Formatter:
    """No ``extra`` of a record is shown and no local variable of a traceback: nobody took the secrets out."""
    import structlog  # 0.1 s of the command line's start, where nobody wants JSON

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            _with_what_it_is_about,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("message"),
            _plain,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
    )


def _with_what_it_is_about(_: WrappedLogger, method: str, line: EventDict) -> EventDict:
    return {**about.known(), **line}


def _plain(_: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """Only what is known; identifiers as text, which JSON numbers are too small for."""
    return {
        name: str(value) if name == "execution_id" else value
        for name, value in line.items()
        if value is not None
    }


def _dumps(line: EventDict, **options: Any) -> str:
    return orjson.dumps(line, default=str).decode()


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("%s: the process ends", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_of_thread(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread is not None else "unknown"
    error = failure.exc_value or failure.exc_type()
    logger.critical("thread %s ends", name, exc_info=(failure.exc_type, error, failure.exc_traceback))
