"""Parts of a step's sink that are left when the step ends, or its execution is cancelled."""

from __future__ import annotations

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.queries import SINK_PARTS
from noetl_dagster.tools.sinks.parts import PartSinks
from noetl_dagster.tools.sinks.place import PartPlace, part_prefix
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram


async def settle_sink(
    runtime: Runtime, execution: Execution, program: StepProgram, visit: int, *, is_over: bool = True
) -> None:
    """Publishes what a process that died, or a worker of the pool, left staged.

    Args:
        is_over: no command of the visit runs any more; what did not complete is discarded.

    Raises:
        ToolError: the sink cannot be reached; what is staged stays so. Or a part is not there.
    """
    if program.sink is None or not program.sink.is_staged:
        return
    await runtime.buffer.flush()
    step = program.step.name
    records = await runtime.pool.fetch(SINK_PARTS, execution.id, step, visit)
    places = [PartPlace.model_validate(record["place"]) for record in records]
    await PartSinks(runtime.box).settle(places, part_prefix(execution.id, step, visit), is_over=is_over)
