"""Every error the project raises on purpose. Each names the thing, the place and the remedy."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args

ErrorKind = Literal[
    "connection",
    "timeout",
    "rate_limit",
    "auth",
    "not_found",
    "client_error",
    "server_error",
    "parse",
    "schema",
    "transform",
    "db",
    "db_connection",
    "db_constraint",
    "db_deadlock",
    "db_timeout",
    "storage",
    "storage_access",
    "storage_quota",
    "python",
    "template",
    "credential",
    "policy",
    "loop",
    "cancelled",
    "unknown",
    "asset",
    "check",
    "claim",
    "context",
    "worker",
]
"""``error.kind``: what went wrong, in the same words for every tool; the last five name parts of the platform itself.

``schema`` is what does not fit: a field of a task, a table without the column. ``transform`` is a result that cannot be
made.
"""

ERROR_KINDS: tuple[str, ...] = get_args(ErrorKind)


class NoetlError(Exception):
    """Base of all errors raised on purpose. ``kind`` is what a playbook sees of one that ends a task."""

    kind: ErrorKind = "unknown"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a playbook file something stands. Lines and columns count from 1."""

    file: str
    line: int
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class ProblemKind(StrEnum):
    """What a problem of a playbook is about. The names are stable: reports of other programs go by them."""

    UNREADABLE_FILE = "unreadable-file"
    MISSING_PLAYBOOK = "missing-playbook"
    YAML_SYNTAX = "yaml-syntax"
    DUPLICATE_KEY = "duplicate-key"
    UNKNOWN_FIELD = "unknown-field"
    MISPLACED_FIELD = "misplaced-field"
    MISSING_FIELD = "missing-field"
    CONFLICTING_FIELDS = "conflicting-fields"
    FIELD_WITHOUT_EFFECT = "field-without-effect"
    INVALID_VALUE = "invalid-value"
    UNSUPPORTED_KIND = "unsupported-kind"
    DUPLICATE_NAME = "duplicate-name"
    UNKNOWN_STEP = "unknown-step"
    EMPTY_STEP = "empty-step"
    UNREACHABLE_STEP = "unreachable-step"
    UNKNOWN_TASK = "unknown-task"
    UNKNOWN_POOL = "unknown-pool"
    TEMPLATE_SYNTAX = "template-syntax"
    UNDEFINED_NAME = "undefined-name"
    CONSTANT_CONDITION = "constant-condition"
    PYTHON_SYNTAX = "python-syntax"
    TEMPLATE_IN_TEXT = "template-in-text"
    CODE_IS_TEMPLATE = "code-is-template"
    TOOL_AS_ERROR_KIND = "tool-as-error-kind"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding about a playbook: where, what, and how to mend it."""

    place: Place
    message: str
    severity: str = "error"  # or "warning"
    kind: ProblemKind = ProblemKind.INVALID_VALUE

    def __str__(self) -> str:
        mark = "" if self.severity == "error" else f"{self.severity}: "
        return f"{self.place}: {mark}{self.message}"


class PlaybookError(NoetlError):
    """A playbook cannot be loaded. ``problems`` holds every finding, in file order."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class TemplateError(NoetlError):
    """A template does not parse or cannot be rendered."""

    kind = "template"


class UndefinedNameError(TemplateError):
    """A template names something that is not known in its scope."""


class ToolError(NoetlError):
    """A tool ran and failed. Task policies see it as ``output.error``.

    Attributes:
        kind: what went wrong; which tool it was is known to who called it.
        retryable: whether the same call may succeed later.
        status: HTTP status, where there is one.
        code: the tool's own error code (SQLSTATE, exit code, ...).
        details: tool-specific envelope parts, for example ``{"pg": {"sqlstate": "40001"}}``.
        retry_after: seconds that the peer asked to wait, where it did.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: ErrorKind,
        retryable: bool = False,
        status: int | None = None,
        code: str | int | None = None,
        details: dict[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        self.status = status
        self.code = code
        self.details = details or {}
        self.retry_after = retry_after


class AssetNotFoundError(NoetlError):
    """A step reads an asset that has no result, or not of the partition that is wanted."""

    kind = "asset"


class CredentialError(NoetlError):
    """A credential is missing or of the wrong type. Never carries secret values.

    Attributes:
        retryable: whether the same call may succeed later: who keeps the secret is out of reach.
    """

    kind = "credential"

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class StorageError(NoetlError):
    """A result cannot be stored or read; names key, bucket or path, and credential."""

    @property
    def kind(self) -> ErrorKind:  # type: ignore[override]
        """By the exception that it was raised from."""
        found = kind_of(self.__cause__)
        return found if found in ("storage_access", "storage_quota") else "storage"


class ReferenceNotAvailableError(StorageError):
    """A result reference points at nothing (expired, deleted or never finished)."""

    kind = "not_found"
    code = "REFERENCE_NOT_AVAILABLE"


class IntegrityError(StorageError):
    """Stored bytes do not have the checksum that was recorded."""


class ExecutionNotFoundError(NoetlError):
    """No event of the execution is in the log."""


class ExecutionStateError(NoetlError):
    """The execution is not in a state that allows the request (already ended, still running, ...)."""


class ExecutionCancelledError(ExecutionStateError):
    """The execution was cancelled while it was being driven."""

    kind = "cancelled"


class WorkloadError(NoetlError):
    """A value given for the workload does not fit the playbook."""


class ExecutionFailedError(NoetlError):
    """An execution that was to complete has not."""


class ServiceError(NoetlError):
    """An embedded or external service cannot be started or reached."""

    kind = "connection"


class VersionError(ServiceError):
    """The schema of the event log is one with which this version may not work; waiting does not help."""


class LaunchError(ServiceError):
    """A run cannot be started just now."""


class NotDeployedError(NoetlError):
    """No code location has the job of a playbook."""


class TransportError(ServiceError):
    """Events or commands cannot be handed over now; the same call may succeed later."""


class EventTooLargeError(NoetlError):
    """An event is larger than its transport carries; store the result and send a reference."""


class EventRefusedError(NoetlError):
    """The receiver will never take this event: malformed, or not for a worker to emit."""


_DENIED = frozenset({"PermissionDeniedError", "UnauthenticatedError", "Forbidden", "Unauthorized"})


def kind_of(error: BaseException | None) -> ErrorKind:
    """What an exception means: ours say it, others by their type (object stores' by name, for they load late)."""
    match error:
        case NoetlError():
            return error.kind
        case FileNotFoundError():
            return "not_found"
        case PermissionError():
            return "storage_access"
        case TimeoutError():
            return "timeout"
        case ConnectionError():
            return "connection"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return "storage_quota"
    if type(error).__name__ in _DENIED:
        return "storage_access"
    return "storage" if isinstance(error, OSError) else "unknown"


def kind_of_status(status: int) -> ErrorKind:
    """What an HTTP status from 400 on means."""
    match status:
        case 401 | 403:
            return "auth"
        case 404:
            return "not_found"
        case 429:
            return "rate_limit"
    return "server_error" if status >= 500 else "client_error"
