"""The fields that log lines carry (execution, step, command, run), which follow tasks and threads; see ``logs``."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context, ContextVar, Token
from typing import Any

_fields: ContextVar[Mapping[str, Any]] = ContextVar("log_context", default={})  # noqa: B039, never written to


class LogContext:
    """Adds fields to the log lines of a ``with`` block, including those of threads and tasks started within it.

    Tasks that outlive the block start with :func:`empty` instead.
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


def current() -> Mapping[str, Any]:
    """Returns the fields that a line logged here and now carries."""
    return _fields.get()


def empty() -> Context:
    """Returns a context without fields, for a task that serves the whole process."""
    return Context()
