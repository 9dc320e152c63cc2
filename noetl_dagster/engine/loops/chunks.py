"""Results that are chunks for other steps: of iterations, and whole ones."""

from __future__ import annotations

from collections.abc import Iterator

from noetl_dagster.engine.loops.gather import iteration_ends
from noetl_dagster.engine.loops.issue import Activation
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.envelopes import OK, Envelope
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.worker.chunks import place_of
from noetl_dagster.worker.command import Command, Outcome


class IterationChunks:
    """Tells of the results of a loop's iterations as chunks, each of one iteration.

    A loop that takes chunks itself gives its own the same numbers, so that their order is kept; any other one numbers
    them as they come.
    """

    def __init__(self, runtime: Runtime, activation: Activation, told: dict[int, int | None]) -> None:
        loop = activation.program.step.loop
        assert loop is not None
        self._streams = runtime.streams
        self._ordered = loop.mode is LoopMode.STREAM
        self._tells_failures = self._ordered and loop.may_fail_in_part
        self._told = {iteration: number for number, iteration in told.items()}
        self._free = _numbers(set(told))

    @classmethod
    async def of(cls, runtime: Runtime, activation: Activation, stop: int) -> IterationChunks | None:
        """For a loop whose chunks somebody takes, with all told that the log knows of; else None.

        Args:
            stop: the index after the last iteration that an earlier run may have done.
        """
        place = (activation.execution.id, activation.step, activation.visit)
        if runtime.streams.of(place) is None:
            return None
        chunks = cls(runtime, activation, await runtime.streams.iterations(place))
        loop = activation.program.step.loop
        replayed = activation.program.retries and loop is not None and loop.cursor is None
        if activation.resumed and not replayed:
            async for end in iteration_ends(runtime, place[0], activation.loop_ids, 0, stop):
                if not end.failed:
                    await chunks.tell(activation.command(end.index, None, end.attempt), end.envelope)
        return chunks

    def has_told(self, index: int) -> bool:
        """Whether an iteration's chunk, or that there is none of it, is in the log."""
        return index in self._told

    async def leave_out(self, command: Command) -> None:
        """Tells that nothing is made of a chunk that the loop takes."""
        if command.index is not None and not self.has_told(command.index):
            self._told[command.index] = command.index
            await self._streams.leave_out(command, command.index)

    async def tell(self, command: Command, envelope: Envelope) -> None:
        """Tells of an iteration that succeeded, once; returns when there is room for another chunk."""
        if command.index in self._told or (envelope["status"] != OK and not self._tells_failures):
            return
        number = command.index if self._ordered else next(self._free)
        assert number is not None
        self._told[command.index] = number
        await self._streams.tell_result(command, number, envelope, more=True)


def _numbers(used: set[int]) -> Iterator[int]:
    """0, 1, 2, ... without those that are used."""
    number = 0
    while True:
        if number not in used:
            yield number
        number += 1


async def tell_whole(runtime: Runtime, command: Command, outcome: Outcome) -> None:
    """Tells of the result of a command without iterations as one chunk, where its tool has told of none."""
    stream = runtime.streams.of(place_of(command))
    if stream is not None and not outcome.failed and not stream.told:
        await runtime.streams.tell_result(command, 0, outcome.envelope, more=False)
