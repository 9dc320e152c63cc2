"""Results that are chunks for other steps: those of iterations, and whole ones."""

from __future__ import annotations

from collections.abc import Iterator

from noetl_dagster.engine.loops.activation import Activation
from noetl_dagster.engine.loops.gather import iteration_ends
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.envelopes import OK, Envelope
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.worker.chunks import stream_key
from noetl_dagster.worker.command import Command, Outcome


class IterationChunks:
    """Publishes the results of a loop's iterations as chunks, one for each iteration.

    A loop that takes chunks itself gives its own the same numbers, which keeps their order. Other loops number them in
    the order in which they are made.
    """

    def __init__(self, runtime: Runtime, activation: Activation, published: dict[int, int | None]) -> None:
        loop = activation.program.loop
        self._streams = runtime.streams
        self._ordered = loop.mode is LoopMode.STREAM
        self._publishes_failures = self._ordered and loop.may_fail_in_part
        self._published = {iteration: number for number, iteration in published.items()}
        self._free = _numbers(set(published))

    @classmethod
    async def of(cls, runtime: Runtime, activation: Activation, stop: int) -> IterationChunks | None:
        """Returns None unless a step takes the loop's chunks. Publishes chunks that an earlier run did not.

        Args:
            stop: the index after the last iteration that an earlier run may have done.
        """
        key = (activation.execution.id, activation.step, activation.visit)
        if runtime.streams.of(key) is None:
            return None
        chunks = cls(runtime, activation, await runtime.streams.iterations(key))
        replayed = activation.program.retries and activation.program.loop.cursor is None
        if activation.resumed and not replayed:
            async for end in iteration_ends(runtime, key[0], activation.loop_ids, 0, stop):
                if not end.failed:
                    await chunks.publish(activation.command(end.index, None, end.attempt), end.envelope)
        return chunks

    def has_published(self, index: int) -> bool:
        """Reports that the log has the chunk of an iteration, or that there is none."""
        return index in self._published

    async def skip(self, command: Command) -> None:
        """Records that the loop makes nothing of a chunk that it takes."""
        if command.index is not None and not self.has_published(command.index):
            self._published[command.index] = command.index
            await self._streams.skip(command, command.index)

    async def publish(self, command: Command, envelope: Envelope) -> None:
        """Publishes the result of a successful iteration once; returns when there is room for another chunk."""
        if command.index in self._published or (envelope["status"] != OK and not self._publishes_failures):
            return
        number = command.index if self._ordered else next(self._free)
        assert number is not None
        self._published[command.index] = number
        await self._streams.publish_result(command, number, envelope, more=True)


def _numbers(used: set[int]) -> Iterator[int]:
    """Yields 0, 1, 2, ... without those that are used."""
    number = 0
    while True:
        if number not in used:
            yield number
        number += 1


async def publish_whole(runtime: Runtime, command: Command, outcome: Outcome) -> None:
    """Publishes the result of a command without iterations as one chunk, unless its tool has published some."""
    stream = runtime.streams.of(stream_key(command))
    if stream is not None and not outcome.failed and not stream.published:
        await runtime.streams.publish_result(command, 0, outcome.envelope, more=False)
