"""What the API refuses, as Kubernetes says it."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """An answer other than success.

    Attributes:
        code: HTTP status.
        reason: Kubernetes' word, ``NotFound``, ``AlreadyExists``, ...
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    def status(self) -> dict[str, Any]:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


def not_found(plural: str, name: str) -> Refused:
    return Refused(404, "NotFound", f'{plural} "{name}" not found')
