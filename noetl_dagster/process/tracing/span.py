"""A span as it is recorded, before OpenTelemetry sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from noetl_dagster.process.tracing.ids import Position

Attributes = dict[str, str | int | float | bool]


class Failure(NamedTuple):
    """Why what a span tells of failed: the kind of the error and its message, without secrets."""

    kind: str
    message: str


@dataclass(slots=True)
class Span:
    """What the exporter sends. Times in nanoseconds since 1970; ``client``: it waits for somebody else's answer."""

    position: Position
    parent: int | None
    name: str
    start: int
    end: int
    attributes: Attributes
    failure: Failure | None = None
    link: Position | None = None
    client: bool = False
    service: str | None = None
