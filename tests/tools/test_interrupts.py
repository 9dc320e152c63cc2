"""Interrupts of code whose time is up: they end the code, and reach nothing else of the process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.process.interrupts import Interrupted
from noetl_dagster.tools.python.threads import CodeThreads
from tests.waiting import PATIENCE_SECONDS, until


class Unraisables:
    """Stands in for ``sys.unraisablehook`` and remembers what it was told, and what hit it."""

    def __init__(self) -> None:
        self.told: list[type[BaseException]] = []
        self.hit: list[BaseException] = []
        self.lasts: Callable[[], object] = lambda: [abs(number) for number in range(2000)]

    def __call__(self, unraisable: Any) -> None:
        try:
            self.told.append(unraisable.exc_type)
            self.lasts()
        except BaseException as error:
            self.hit.append(error)


@pytest.fixture
def unraisables(monkeypatch: pytest.MonkeyPatch) -> Unraisables:
    hook = Unraisables()
    monkeypatch.setattr(sys, "unraisablehook", hook)
    return hook


async def abandoned(threads: CodeThreads, code: Callable[[], Any], begun: Callable[[], object]) -> None:
    """Runs code until it has begun, and gives it up."""
    call = asyncio.create_task(threads.run(code))
    await until(begun)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_an_interrupt_that_python_drops_is_repeated(unraisables: Unraisables) -> None:
    begun, ended, places = threading.Event(), threading.Event(), []

    class Held:
        def __del__(self) -> None:
            begun.set()
            while True:  # what is raised here is only reported
                abs(1)

    def code() -> None:
        held = Held()
        places.append(threading.current_thread())
        try:
            del held
            while True:
                abs(1)
        finally:
            ended.set()

    threads = CodeThreads(limit=1, repeat_seconds=0.1, grace_seconds=0)
    await abandoned(threads, code, begun.is_set)
    await until(ended.is_set)

    assert places[0] is not threading.main_thread()
    assert unraisables.told == [Interrupted]
    assert await threads.run(lambda: "another thread took the place") == "another thread took the place"


async def test_a_hook_of_the_interpreter_is_never_interrupted(unraisables: Unraisables) -> None:
    begun, go_on, ended, looks = threading.Event(), threading.Event(), threading.Event(), itertools.count()

    def lasts() -> None:
        begun.set()
        while not go_on.is_set():
            next(looks)

    def code() -> None:
        try:
            Failing()
            while True:
                abs(1)
        finally:
            ended.set()

    unraisables.lasts = lasts
    threads = CodeThreads(limit=1, repeat_seconds=0.001, grace_seconds=0)
    await abandoned(threads, code, begun.is_set)
    before = next(looks)
    await asyncio.sleep(0.2)  # time for several interrupts, where any were sent
    await until(lambda: next(looks) > before + 1000)
    assert not ended.is_set()
    go_on.set()
    await until(ended.is_set)

    assert unraisables.told == [ValueError]
    assert unraisables.hit == []


class Failing:
    """Raises where Python can only report it."""

    def __del__(self) -> None:
        raise ValueError


AFTERWARDS = """
import asyncio, sys, time
from noetl_dagster.tools.python.threads import CodeThreads


def endless():
    while True:
        time.sleep(0.001)


async def work():
    threads = CodeThreads(repeat_seconds=0.05)
    assert await threads.run(lambda: 1) == 1
    call = asyncio.create_task(threads.run(endless))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.wait([call])
    while any(frame.f_code is endless.__code__ for frame in sys._current_frames().values()):
        await asyncio.sleep(0.01)


asyncio.run(work())
sys.setprofile(lambda *_: None)
print(sum(map(abs, range(1000))))
"""


@pytest.mark.long
def test_python_does_not_go_on_looking_for_interrupts() -> None:
    """Where one was left behind, CPython 3.11 never returns from the next call under a profiler."""
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout == "499500\n", done.stderr


async def test_a_call_that_waits_gets_the_place_of_one_that_hangs() -> None:
    hang, begun = threading.Event(), threading.Event()

    def code() -> None:
        begun.set()
        hang.wait()  # a blocking call: nothing interrupts it

    threads = CodeThreads(limit=1)
    first = asyncio.create_task(threads.run(code))
    await until(begun.is_set)
    second = asyncio.create_task(threads.run(lambda: "had its turn"))
    await asyncio.sleep(0)
    first.cancel()

    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await second == "had its turn"
    finally:
        hang.set()


async def test_no_lock_of_a_condition_is_left_taken(unraisables: Unraisables) -> None:
    """As in ``Future.result``: whoever is to end the future would wait for the lock for ever."""
    condition, begun, ended = threading.Condition(), threading.Event(), threading.Event()

    def code() -> None:
        begun.set()
        try:
            with condition:
                while True:
                    abs(1)
        finally:
            ended.set()

    threads = CodeThreads(limit=1, repeat_seconds=0.001, grace_seconds=0)
    lock = condition._lock  # type: ignore[attr-defined]
    lock.acquire()  # the code waits for it, and is given it after it was given up
    await abandoned(threads, code, begun.is_set)
    await asyncio.sleep(0.1)
    lock.release()
    await until(ended.is_set)

    assert condition.acquire(timeout=PATIENCE_SECONDS)


class Blocking(logging.Handler):
    """A handler that tells when somebody is about to wait for its lock."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def filter(self, record: logging.LogRecord) -> bool:
        self.waiting.set()
        return True

    def emit(self, record: logging.LogRecord) -> None:
        pass


async def test_an_endless_import_is_interrupted_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unraisables: Unraisables
) -> None:
    (tmp_path / "endless_module.py").write_text("import begun_module\nwhile True: abs(1)")
    (tmp_path / "begun_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    ended = threading.Event()

    def code() -> None:
        try:
            importlib.import_module("endless_module")
        finally:
            ended.set()

    threads = CodeThreads(limit=1, repeat_seconds=0.05, grace_seconds=0.1)
    await abandoned(threads, code, lambda: "begun_module" in sys.modules)
    await until(ended.is_set)
    monkeypatch.delitem(sys.modules, "begun_module", raising=False)


BURNERS = 6


@pytest.fixture
def burners() -> Iterator[None]:
    """Programs that want every core, for as long as a test runs."""
    program = [sys.executable, "-c", "import sys\nprint(flush=True)\nwhile True: abs(1)"]
    started = [subprocess.Popen(program, stdout=subprocess.PIPE) for _ in range(BURNERS)]
    try:
        for burner in started:
            assert burner.stdout is not None
            burner.stdout.readline()
        yield
    finally:
        for burner in started:
            burner.kill()
            burner.communicate()


@pytest.fixture
async def strays(monkeypatch: pytest.MonkeyPatch, unraisables: Unraisables) -> AsyncIterator[list[Any]]:
    """Every ``Interrupted`` that came out where no playbook code is."""
    found: list[Any] = unraisables.hit
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(arguments.exc_value))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(context.get("exception") or context))
    yield found
    loop.set_exception_handler(None)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads change places after nearly every instruction, not two hundred times a second."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
async def test_deadlines_at_the_very_end_of_code_reach_nothing_but_code(
    jobs: int, burners: None, eager_switches: None, strays: list[Any]
) -> None:
    """Thousands of short calls that are given up about when they end, on a machine without a free core."""
    threads = CodeThreads(limit=4, repeat_seconds=0.0001)
    handler = Blocking()
    logger = logging.Logger("of the code")
    logger.addHandler(handler)

    def plain() -> None:
        for _ in range(20):
            abs(1)

    def telling() -> None:
        logger.info("told")

    def dropping() -> None:
        Failing()

    def catching() -> None:
        for _ in range(2):
            with contextlib.suppress(BaseException):
                plain()

    outcomes: Counter[str] = Counter()
    numbers = iter(range(jobs))
    kinds = (plain, telling, dropping, catching)
    await asyncio.gather(*(_given_up_at_the_end(threads, kind, numbers, outcomes) for kind in kinds))

    assert strays == []
    assert min(outcomes["ended"], outcomes["given up"]) > jobs / 10
    assert handler.lock is not None
    assert handler.lock.acquire(timeout=PATIENCE_SECONDS)
    # every place is left, and none was counted twice: four calls wait for each other, and a fifth for them
    meeting, fifth = threading.Barrier(5), threading.Event()
    calls = [asyncio.create_task(threads.run(meeting.wait)) for _ in range(4)]
    await until(lambda: meeting.n_waiting == 4)
    calls.append(asyncio.create_task(threads.run(fifth.set)))
    meeting.wait()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*calls)
    assert fifth.is_set()


async def _given_up_at_the_end(
    threads: CodeThreads, code: Callable[[], None], numbers: Iterator[int], outcomes: Counter[str]
) -> None:
    """Gives calls up after as many turns of the loop as they took lately, however fast the machine is."""
    turns = 1.0
    chance = random.Random(code.__name__)
    for _ in numbers:
        begun = threading.Event()
        call = asyncio.create_task(threads.run(lambda begun=begun: (begun.set(), code())))
        at_once = chance.random() < 0.1  # some are given up while no thread has taken them
        while not (at_once or begun.is_set() or call.done()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(int(turns * chance.uniform(0.5, 1.5))):
            await asyncio.sleep(0)
        call.cancel()
        try:
            await call
            outcomes["ended"] += 1
            turns = max(1.0, turns * 0.9)
        except asyncio.CancelledError:
            outcomes["given up"] += 1
            turns = turns * 1.1 + 0.1
