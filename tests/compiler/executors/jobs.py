"""Ordinary Dagster jobs on the threaded executor. What their ops see of each other is in ``SEEN``."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dagster import (
    AssetCheckResult,
    Definitions,
    In,
    Nothing,
    OpExecutionContext,
    Out,
    Output,
    RetryPolicy,
    asset,
    asset_check,
    define_asset_job,
    failure_hook,
    job,
    op,
    success_hook,
)

from noetl_dagster.compiler.executors import threaded_executor
from tests.waiting import PATIENCE_SECONDS


class Seen:
    """How many steps ran at the same time, and what happened, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.happened: list[str] = []
        self.meeting = threading.Barrier(4)

    def say(self, what: str) -> None:
        with self._lock:
            self.happened.append(what)

    @contextlib.contextmanager
    def inside(self, *places: str) -> Iterator[None]:
        with self._lock:
            for place in places:
                self.now[place] = self.now.get(place, 0) + 1
                self.most[place] = max(self.most.get(place, 0), self.now[place])
        try:
            yield
        finally:
            with self._lock:
                for place in places:
                    self.now[place] -= 1


SEEN = Seen()


@op
def meets(context: OpExecutionContext) -> str:
    print(f"stdout of {context.op_handle.name}\n", end="")  # in one write: the steps share the stream
    SEEN.meeting.wait(PATIENCE_SECONDS)
    return str(context.op_handle.name)


@op
def together(names: list[str]) -> list[str]:
    return sorted(names)


@job(executor_def=threaded_executor)
def meeting() -> None:
    """Four steps that end only when all four have begun."""
    together([meets.alias(name)() for name in ("a", "b", "c", "d")])


@op(tags={"kind": "slow"})
def slow() -> None:
    with SEEN.inside("slow"):
        time.sleep(0.05)


@op(pool="narrow")
def pooled() -> None:
    with SEEN.inside("narrow"):
        time.sleep(0.05)


@job(executor_def=threaded_executor)
def many() -> None:
    for number in range(6):
        slow.alias(f"slow_{number}")()


@job(executor_def=threaded_executor)
def in_a_pool() -> None:
    for number in range(2):
        pooled.alias(f"pooled_{number}")()


@op(retry_policy=RetryPolicy(max_retries=2, delay=0.01))
def flaky(context: OpExecutionContext) -> None:
    SEEN.say(f"try {context.retry_number}")
    if context.retry_number < 2:
        raise ValueError("not yet")


@success_hook
def well(context: Any) -> None:
    SEEN.say(f"hook: {context.op.name} went well")


@failure_hook
def badly(context: Any) -> None:
    SEEN.say(f"hook: {context.op.name} failed: {context.op_exception}")


@op(out={"yes": Out(is_required=False), "no": Out(is_required=False)})
def chooses() -> Iterator[Output[int]]:
    yield Output(1, "yes")


@op
def follows(value: int) -> None:
    SEEN.say("followed")


@op(config_schema={"marker": str})
def fails_once(context: OpExecutionContext) -> int:
    marker = Path(context.op_config["marker"])
    if not marker.exists():
        marker.touch()
        raise ValueError("the first time")
    return 1


@job(executor_def=threaded_executor, hooks={well, badly})
def retried() -> None:
    flaky()


@job(executor_def=threaded_executor, hooks={well, badly})
def halved() -> None:
    follows.alias("after_failure")(fails_once())
    other = slow.alias("beside")()
    assert other is not None


@job(executor_def=threaded_executor)
def chosen() -> None:
    yes, no = chooses()
    follows.alias("on_yes")(yes)
    follows.alias("on_no")(no)


@op(ins={"start": In(Nothing)}, config_schema={"folder": str})
def waits(context: OpExecutionContext) -> None:
    folder = Path(context.op_config["folder"])
    (folder / f"began-{context.op_handle.name}").touch()
    try:
        for _ in range(int(PATIENCE_SECONDS * 100)):
            time.sleep(0.01)
    finally:
        (folder / f"ended-{context.op_handle.name}").touch()


@op(config_schema={"folder": str})
def waits_for_a_lock(context: OpExecutionContext) -> None:
    """Is given the lock that it waits for a while after it was interrupted."""
    folder = Path(context.op_config["folder"])
    condition, held = threading.Condition(), threading.Event()

    def hold() -> None:
        with condition:
            held.set()
            while not (folder / "release").exists():
                time.sleep(0.01)
        time.sleep(0.1)  # the step is the next to have it
        mark = "free" if condition.acquire(timeout=PATIENCE_SECONDS) else "kept"
        (folder / mark).touch()

    threading.Thread(target=hold).start()
    held.wait()
    (folder / "began").touch()
    with condition:
        for _ in range(int(PATIENCE_SECONDS * 100)):
            time.sleep(0.01)


@job(executor_def=threaded_executor)
def locked() -> None:
    waits_for_a_lock()


@job(executor_def=threaded_executor)
def endless() -> None:
    for name in ("left", "right"):
        waits.alias(name)()


@asset
def source() -> int:
    return 3


@asset_check(asset=source, blocking=True)
def is_three(source: int) -> AssetCheckResult:
    return AssetCheckResult(passed=source == 3, metadata={"value": source})


@asset
def derived(source: int) -> int:
    return source + 1


assets = Definitions(
    assets=[source, derived],
    asset_checks=[is_three],
    jobs=[define_asset_job("asset_job", executor_def=threaded_executor)],
)
