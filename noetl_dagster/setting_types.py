"""Types of settings: how their values are read from text, and checked."""

from __future__ import annotations

import logging
import re
from typing import Any

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

SUBJECT_NAME = r"^[A-Za-z0-9_-]+$"
"""A part of names of NATS: without wildcards and spaces."""

_ADDRESS_SEPARATOR = re.compile(r",(?=\s*\w+://)")

NoneIfEmpty = BeforeValidator(lambda value: None if value == "" else value)
"""Treats an empty value as unset, since a container's variables may be empty."""


def _names(value: Any) -> Any:
    """Reads names that are separated by commas, or a JSON list."""
    if not isinstance(value, str):
        return value
    return _json(value) if value.startswith("[") else tuple(filter(None, map(str.strip, value.split(","))))


def _json(value: Any) -> Any:
    """Reads JSON."""
    try:
        return orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError as error:
        raise ValueError(f"write JSON: {error}") from None


Listed = BeforeValidator(_names)
Json = BeforeValidator(_json)

_HOSTS = re.compile(r"(\w+)://(?:.*@)?([^/?#]*)", re.DOTALL)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s\[\]:,]*)(?::(\d{1,5}))?")
"""The scheme and the hosts of an address, and one host with its port; passwords may be badly escaped."""


def address_with(*schemes: str, names_host: bool = True, host: str = "host") -> AfterValidator:
    """Checks the form of addresses, which commas separate, as they may separate hosts; an empty one is unset."""
    example = " or ".join(f"{scheme}://{host}" for scheme in schemes)

    def fits(one: str) -> bool:
        address = _HOSTS.match(one)
        if address is None or address[1] not in schemes:
            return False
        hosts = [_HOST.fullmatch(text) for text in address[2].split(",")]
        return all(matches and (matches[1] or not names_host) and 0 < int(matches[2] or 1) < 65536 for matches in hosts)

    def check(value: str | None) -> str | None:
        addresses = separate_addresses(value or "")
        if value and not (
            addresses and all(map(fits, addresses))
        ):  # the error has no value, which may contain a password
            raise ValueError(f"write {example}, with a port from 1 to 65535 or none")
        return value or None

    return AfterValidator(check)


HttpAddress = address_with("http", "https")
DatabaseAddress = address_with("postgresql", "postgres", names_host=False)  # ?host= names one, or a socket


def _level(value: str) -> str:
    levels = logging.getLevelNamesMapping()
    if value.upper() not in levels:
        raise ValueError(f"write one of {', '.join(levels)}")
    return value.upper()


LogLevel = AfterValidator(_level)

POD_RIGHTS = (
    *("hostPath", "serviceAccount", "secret", "volume", "capability", "privileged", "allowPrivilegeEscalation"),
    *("hostNetwork", "hostPID", "hostIPC", "procMount", "seccompProfile", "appArmorProfile"),
    *("seLinuxOptions", "windowsOptions", "runAsRoot"),
)
"""Rights of pods that an installation may allow: all, or those of a value: ``hostPath:/data``."""


def _rights(value: tuple[str, ...]) -> tuple[str, ...]:
    for entry in value:
        if entry.partition(":")[0] not in POD_RIGHTS:
            raise ValueError(f"{entry!r} is unknown; write one of {', '.join(POD_RIGHTS)}, some with :value")
    return value


PodRights = AfterValidator(_rights)


class PodMetadata(BaseModel, extra="forbid", frozen=True):
    """Labels and annotations."""

    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class PodSpec(BaseModel, extra="allow", frozen=True):
    """Any fields of a pod's spec, and one container at most."""

    containers: tuple[dict[str, Any], ...] = Field((), max_length=1)


class PodTemplate(BaseModel, extra="forbid", frozen=True):
    """Parts of a pod, in Kubernetes' syntax."""

    metadata: PodMetadata = Field(default_factory=PodMetadata)
    spec: PodSpec = Field(default_factory=PodSpec)

    @property
    def container(self) -> dict[str, Any]:
        """The fields of the container."""
        return dict(self.spec.containers[0]) if self.spec.containers else {}


def separate_addresses(text: str) -> list[str]:
    """Returns the addresses in a text, which commas separate; passwords may contain commas."""
    return [address for part in _ADDRESS_SEPARATOR.split(text) if (address := part.strip(", "))]


def without_login(url: str) -> str:
    """Returns an address without its user, password or token.

    Everything between ``//`` and the last ``@`` is removed, because passwords may be badly escaped.
    """
    return re.sub(r"//.*@", "//", url)
