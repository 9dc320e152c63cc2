"""Faults of the network and of answers: traffic between processes and one server is disturbed for a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from noetl_dagster.events.transport.nats import NatsNames
from noetl_dagster.storage.placement import KEY_ROOT
from tests.chaos.machine import Machine
from tests.chaos.network import WAYS
from tests.chaos.scene import Scene
from tests.proxy import Answer, Traffic

Draw = Callable[[random.Random], Traffic]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Changes the traffic to a server.

    Attributes:
        what: done to the part, for the name.
        draw: returns the traffic; with what it chooses at random.
    """

    what: str
    part: str
    draw: Draw
    seconds: tuple[float, float] = (0.2, 2.0)

    @property
    def name(self) -> str:
        return f"{self.what} {self.part}"

    def inject(self, scene: Scene) -> bool:
        for way in WAYS[self.part]:
            scene.machine.network.disturb(way, self.draw(scene.chances))
        return True

    def heal(self, scene: Scene) -> None:
        for way in WAYS[self.part]:
            scene.machine.network.heal(way)


def _slowed(chances: random.Random) -> Traffic:
    return Traffic(seconds=chances.uniform(0.01, 0.2))


def _throttled(chances: random.Random) -> Traffic:
    return Traffic(bytes_per_second=chances.uniform(10_000, 200_000))


def _swallowed(chances: random.Random) -> Traffic:
    """Requests are carried out, and their answers get lost."""
    share = chances.uniform(0.2, 0.8)
    return Traffic(swallows=lambda _: chances.random() < share)


def answering(*answers: Answer, only: bytes = b"") -> Draw:
    """Returns the traffic in which some requests are answered in one of these ways.

    Args:
        only: the requests whose first line has these words.
    """

    def draw(chances: random.Random) -> Traffic:
        share = chances.uniform(0.2, 1.0)

        def answer(request: bytes) -> Answer | None:
            disturbs = only in request.partition(b"\r\n")[0] and chances.random() < share
            return chances.choice(answers) if disturbs else None

        return Traffic(answers=answer)

    return draw


def _error(status: str) -> Answer:
    code = b"<Error><Code>InternalError</Code><Message>chaos</Message></Error>"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(code)}\r\nConnection: close\r\n\r\n"
    return Answer(instead=head.encode() + code)


OF_A_RESULT = f"/{KEY_ROOT}".encode()


@dataclass(frozen=True, slots=True)
class Repetition:
    """Publishes events of workers again, in another order, as a stream that delivers them twice."""

    part: str = "nats"
    seconds: tuple[float, float] = (0.5, 2.0)
    name: str = "repeat and reorder nats"

    def inject(self, scene: Scene) -> bool:
        scene.machine.network.start(self.name, _repeat(scene.machine, scene.chances))
        return True

    def heal(self, scene: Scene) -> None:
        scene.machine.network.cancel(self.name)


AGAIN = {"Chaos": "again"}
REPEATED_SECONDS = 0.2


async def _repeat(machine: Machine, chances: random.Random) -> None:
    client: Client = await nats.connect(machine.direct.nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    taken: list[Msg] = []

    async def take(message: Msg) -> None:
        if not (message.headers or {}).get("Chaos"):
            taken.append(message)

    try:
        await client.subscribe(f"{NatsNames(machine.direct).event_prefix}.>", cb=take)
        while True:
            await asyncio.sleep(REPEATED_SECONDS)
            again, taken[:] = taken[:], []
            chances.shuffle(again)
            for message in again:
                headers = {name: text for name, text in (message.headers or {}).items() if name != "Nats-Msg-Id"}
                with suppress(nats.errors.Error):
                    await client.publish(message.subject, message.data, headers=headers | AGAIN)
    finally:
        await client.close()


DISTURBANCES: tuple[Disturbance | Repetition, ...] = (
    *(
        Disturbance(what, part, draw)
        for part in WAYS
        for what, draw in (
            ("cut off", lambda _: Traffic(is_cut=True)),
            ("half open", lambda _: Traffic(is_silent=True)),
            ("delay", _slowed),
            ("throttle", _throttled),
        )
    ),
    Disturbance("lose answers of", "api", _swallowed),
    Disturbance("ask twice", "api", answering(Answer(twice=True), only=b"POST")),
    Repetition(),
    Disturbance("500 of", "object_store", answering(_error("500 Internal Server Error"))),
    Disturbance("503 of", "object_store", answering(_error("503 Slow Down"))),
    Disturbance("late answers of", "object_store", answering(Answer(seconds=0.5), Answer(seconds=2.0))),
    Disturbance("cut answers of", "object_store", answering(Answer(stops_after=50), Answer(stops_after=2000))),
    Disturbance("wrong bytes of", "object_store", answering(Answer(damages=True), only=OF_A_RESULT)),
)
