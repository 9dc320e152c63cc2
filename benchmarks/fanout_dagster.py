"""The peer of the fan-out benchmark: one Dagster dynamic output an item, with Dagster's two executors."""

# No "from __future__ import annotations": Dagster reads the annotations of ops.
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster import (
    DagsterInstance,
    DynamicOut,
    DynamicOutput,
    JobDefinition,
    OpExecutionContext,
    execute_job,
    in_process_executor,
    job,
    multiprocess_executor,
    op,
    reconstructable,
)


@op(out=DynamicOut(int), config_schema={"items": int})
def expand(context: OpExecutionContext) -> Iterator[DynamicOutput[int]]:
    for index in range(context.op_config["items"]):
        yield DynamicOutput(index, mapping_key=str(index))


@op
def double(item: int) -> int:
    return item * 2


@op
def total(items: list[int]) -> int:
    return sum(items)


@job(executor_def=in_process_executor)
def in_process() -> None:
    total(expand().map(double).collect())


@job(executor_def=multiprocess_executor)
def multiprocess() -> None:
    total(expand().map(double).collect())


def in_process_rate(items: int, folder: Path) -> float:
    """Items a second with all steps in one process."""
    return _rate(in_process, items, folder / "in-process")


def multiprocess_rate(items: int, folder: Path) -> float:
    """Items a second with a process a step, as many at once as there are cores."""
    return _rate(multiprocess, items, folder / "multiprocess")


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drops what this process and its children write to stderr."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _rate(wanted: JobDefinition, items: int, folder: Path) -> float:
    folder.mkdir()
    with DagsterInstance.local_temp(str(folder)) as instance:
        started = time.perf_counter()
        config = {
            "ops": {"expand": {"config": {"items": items}}},
            "loggers": {"console": {"config": {"log_level": "ERROR"}}},
        }
        if wanted is in_process:
            result = wanted.execute_in_process(run_config=config, instance=instance)
            assert result.success
        else:
            wanted = reconstructable(multiprocess)
            with (
                _silent_stderr(),  # the processes of steps log before they know of the run's configuration
                execute_job(wanted, instance=instance, run_config=config) as done,
            ):
                assert done.success
        return items / (time.perf_counter() - started)
