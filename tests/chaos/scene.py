"""What faults hit, and their interface."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tests.chaos.machine import Machine


@dataclass(slots=True)
class Scene:
    """What a fault may hit: a machine, and the process that drives the flow now, None between two."""

    machine: Machine
    chances: random.Random
    driver: Callable[[], int | None]


class Fault(Protocol):
    """A fault. Healing one that has not hit anything is harmless.

    Attributes:
        part: what it hits.
        seconds: the range of its duration; it is healed after that.
    """

    @property
    def name(self) -> str: ...

    @property
    def part(self) -> str: ...

    @property
    def seconds(self) -> tuple[float, float]: ...

    def inject(self, scene: Scene) -> bool:
        """Hits the scene; False if what it would hit is not there now."""

    def heal(self, scene: Scene) -> None: ...
