"""The errors that the project raises. Each message names the thing, the place and the fix."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from fastapi.exceptions import RequestValidationError
    from pydantic import ValidationError

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
"""The values of ``error.kind``, the same for every tool. The last five concern parts of the platform itself.

``schema`` is a mismatch, such as an invalid field of a task or a missing column. ``transform`` is a result that cannot
be computed.
"""

ERROR_KINDS: tuple[str, ...] = get_args(ErrorKind)


class NoetlError(Exception):
    """Base class of all errors of the project. Playbooks see ``kind`` if the error ends a task."""

    kind: ErrorKind = "unknown"


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a playbook file. Lines and columns count from 1."""

    file: str
    line: int
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class ProblemKind(StrEnum):
    """The kinds of problems of a playbook. The names are stable, since other programs rely on them."""

    UNREADABLE_FILE = "unreadable-file"
    MISSING_PLAYBOOK = "missing-playbook"
    MISSING_CREDENTIAL = "missing-credential"
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
    UNQUOTED_TEMPLATE = "unquoted-template"
    FOREIGN_BRACES = "foreign-braces"
    RIGHT_NOT_ALLOWED = "right-not-allowed"
    MISSING_EXTRA = "missing-extra"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a playbook: its place, its cause and its fix."""

    place: Place
    message: str
    severity: str = "error"  # or "warning"
    kind: ProblemKind = ProblemKind.INVALID_VALUE

    def __str__(self) -> str:
        mark = "" if self.severity == "error" else f"{self.severity}: "
        return f"{self.place}: {mark}{self.message}"


class PlaybookError(NoetlError):
    """A playbook cannot be loaded. ``problems`` contains all problems, in file order."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class TemplateError(NoetlError):
    """A template does not parse or cannot be rendered."""

    kind = "template"


class UndefinedNameError(TemplateError):
    """A template uses a name that its scope does not define."""


class ToolError(NoetlError):
    """A tool ran and failed. Task policies see it as ``output.error``.

    Attributes:
        kind: the cause, in the words of :data:`ErrorKind`.
        retryable: True if the same call may succeed later.
        status: HTTP status, if there is one.
        code: the tool's own error code (SQLSTATE, exit code, ...).
        details: tool-specific envelope parts, for example ``{"pg": {"sqlstate": "40001"}}``.
        retry_after: seconds that the server asked to wait, if it did.
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
    """A step reads an asset that has no result, or none for the requested partition."""

    kind = "asset"


class CredentialError(NoetlError):
    """A credential is missing, has the wrong type, or gives no token. The message never contains secret values.

    Attributes:
        kind: ``credential``, or the cause if a server refuses a token or cannot be reached.
        retryable: True if the secret manager or token server is unreachable, so that the same call may succeed later.
    """

    def __init__(self, message: str, *, retryable: bool = False, kind: ErrorKind = "credential") -> None:
        super().__init__(message)
        self.retryable = retryable
        self.kind = kind

    def again(self) -> CredentialError:
        """Returns an equal error for another caller: each raising grows an error."""
        return CredentialError(str(self), retryable=self.retryable, kind=self.kind)


class StorageError(NoetlError):
    """A result cannot be stored or read. The message names the key, the bucket or path, and the credential."""

    @property
    def kind(self) -> ErrorKind:  # type: ignore[override]
        """The kind of the exception from which this one was raised."""
        cause = kind_of(self.__cause__)
        return cause if cause in ("storage_access", "storage_quota") else "storage"


class ReferenceNotAvailableError(StorageError):
    """The result of a reference does not exist: it is expired, deleted or was never completed."""

    kind = "not_found"
    code = "REFERENCE_NOT_AVAILABLE"


class RefusedEventError(StorageError):
    """The event log cannot store an event: a value in it was not admitted, or is larger than PostgreSQL allows."""


class IntegrityError(StorageError):
    """The checksum of stored bytes differs from the recorded one."""


class FormatError(IntegrityError, ValueError):
    """Bytes do not have the format or the compression that is recorded, or that their name implies."""


class ExecutionNotFoundError(NoetlError):
    """The log has no event of the execution."""


class ExecutionStateError(NoetlError):
    """The state of the execution does not allow the request, for example because it has ended."""


class ExecutionCancelledError(ExecutionStateError):
    """The execution was cancelled while this process drove it."""

    kind = "cancelled"


class WorkloadError(NoetlError):
    """A workload value does not fit the playbook."""


class ExecutionFailedError(NoetlError):
    """An execution failed that was expected to complete."""


class ServiceError(NoetlError):
    """An embedded or external service cannot be started or reached."""

    kind = "connection"


class VersionError(ServiceError):
    """This version cannot work with the schema of the event log; waiting does not help."""


class LostEventsError(ServiceError):
    """The event log lacks events that it had recorded, as after a failover to an asynchronous standby."""


class LaunchError(ServiceError):
    """A run cannot be started at the moment."""


class NotDeployedError(NoetlError):
    """No code location contains the job of a playbook, or the playbook cannot be started in the wanted way."""


class TransportError(ServiceError):
    """Events or commands cannot be sent now; the same call may succeed later."""


class EventTooLargeError(NoetlError):
    """An event exceeds the limit of its transport. Store the result and send a reference."""


class EventRefusedError(NoetlError):
    """The receiver rejects this event for good: it is malformed, or workers may not emit it."""


_DENIED = frozenset({"PermissionDeniedError", "UnauthenticatedError", "Forbidden", "Unauthorized"})


def kind_of(error: BaseException | None) -> ErrorKind:
    """Returns the kind of an exception. Errors of object stores are recognised by name, since they load late."""
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
    """Returns the kind of an HTTP status from 400 on."""
    match status:
        case 401 | 403:
            return "auth"
        case 404:
            return "not_found"
        case 429:
            return "rate_limit"
    return "server_error" if status >= 500 else "client_error"


def first_invalid(error: ValidationError | RequestValidationError, *place: str) -> str:
    """Returns the first field that a model of pydantic refuses, after the place of the model, and the reason.

    Such as ``context.step: Field required``.
    """
    first = error.errors()[0]
    where = ".".join(map(str, (*place, *first["loc"])))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
