"""What log lines are about: names that follow tasks and threads. :mod:`noetl_dagster.process.logs` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context, ContextVar, Token
from types import TracebackType
from typing import Any

_known: ContextVar[Mapping[str, Any]] = ContextVar("about", default={})  # noqa: B039, never written to


class About:
    """Within the block, log lines name what they are about: execution, step, command, run.

    Also in the threads and tasks that are started within; see :func:`nothing` for tasks that outlive it.
    """

    __slots__ = ("_names", "_token")

    def __init__(
        self,
        *,
        execution_id: int | None = None,
        step: str | None = None,
        command_id: str | None = None,
        **more: str,
    ) -> None:
        # a child playbook's steps have none of the names of the command that runs it
        self._names: dict[str, Any] = {
            "execution_id": execution_id,
            "step": step,
            "command_id": command_id,
            **more,
        }

    def __enter__(self) -> None:
        self._token: Token[Mapping[str, Any]] = _known.set({**_known.get(), **self._names})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _known.reset(self._token)


def known() -> Mapping[str, Any]:
    """What a line that is logged here and now is about."""
    return _known.get()


def nothing() -> Context:
    """The context of a task that serves everybody, though it is started where something particular is done."""
    return Context()
