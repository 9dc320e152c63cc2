"""Runs under faults: what a seed chooses, one run, and many."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg2

from noetl_dagster.errors import StorageError
from tests.chaos import faults, flows, moments
from tests.chaos.faults import Clock
from tests.chaos.flows import Flow
from tests.chaos.machine import Machine
from tests.chaos.moments import Moment, hit_at
from tests.chaos.run import Run
from tests.chaos.scene import Fault, Scene
from tests.chaos.secrets import Found
from tests.chaos.state import EndState, Remains, remains

SETTLED_SECONDS = 20.0
SLOW_SECONDS = 30.0
"""A run that takes longer shows its logs."""

INJECTING_SECONDS = 5.0
"""Faults are healed when all have hit, or after this time: one may wait for a server that another has stopped."""

PAGED_EXECUTIONS = 5
"""Executions whose pages are searched for the secret."""

STRIKE = re.compile(r"(?P<faults>.+) at (?P<by>event|cut event|time) (?P<share>[\d.]+) for (?P<seconds>[\d.]+) s")


@dataclass(frozen=True, slots=True)
class Strike:
    """One or two faults at the same moment, and for how long."""

    moment: Moment
    faults: tuple[Fault, ...]
    seconds: float

    def __str__(self) -> str:
        by = ("cut event" if self.moment.cuts else "event") if self.moment.at_event else "time"
        names = " and ".join(one.name for one in self.faults)
        return f"{names} at {by} {self.moment.share} for {self.seconds} s"

    @classmethod
    def of(cls, text: str) -> Strike:
        """Reads the text of a strike."""
        found = STRIKE.fullmatch(text)
        assert found is not None, f"{text!r} is not of the form '<fault> at event 0.5 for 1.0 s'"
        by = found["by"]
        moment = Moment(float(found["share"]), at_event=by != "time", cuts=by == "cut event")
        hitting = tuple(faults.BY_NAME[name] for name in found["faults"].split(" and "))
        return cls(moment, hitting, float(found["seconds"]))


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to one run. Its text contains all of it, so that it can be repeated after faults were added."""

    flow: Flow
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        return f"{self.flow.name}: {'; '.join(map(str, self.strikes))}"

    @classmethod
    def of(cls, text: str) -> Plan:
        """Reads the text of a plan."""
        name, _, strikes = text.partition(": ")
        return cls(flows.BY_NAME[name], tuple(map(Strike.of, strikes.split("; "))))


def plan(
    seed: int, number: int, among: tuple[Flow, ...] = flows.FLOWS, kinds: tuple[Fault, ...] = faults.FAULTS
) -> Plan:
    """Returns the plan of a run. It depends on nothing but its arguments."""
    chances = random.Random(f"{seed}:{number}")
    flow = chances.choices(among, [one.weight for one in among])[0]
    kinds = tuple(
        fault
        for fault in kinds
        if flow.uses(fault.part) and not (flow.starts_jvm and isinstance(fault, Clock) and fault.part == "driver")
    )
    strikes = []
    count = chances.choices((1, 2, 3), (3, 4, 3))[0]
    for _ in range(count):
        both = tuple(chances.sample(kinds, min(len(kinds), 2 if chances.random() < 0.2 else 1)))
        at_event, cuts = chances.random() < 0.6, chances.random() < 0.5
        moment = Moment(round(chances.random() / count, 2), at_event, at_event and cuts)
        shortest, longest = both[0].seconds
        strikes.append(Strike(moment, both, round(chances.uniform(shortest, longest), 2)))
    return Plan(flow, tuple(strikes))


@dataclass(slots=True)
class Hit:
    """A fault that has hit, and how long after it was healed the log had its next event."""

    fault: str
    recovery_seconds: float = 0.0


@dataclass(slots=True)
class Outcome:
    """How one run ended: ``defects`` is empty if it equals an undisturbed one."""

    plan: Plan
    hits: list[Hit] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    resumes: int = 0
    swept: int = 0
    seconds: float = 0.0
    said: str = ""


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A run that nothing disturbed."""

    state: EndState
    events: int
    seconds: float


class Campaign:
    """Runs one after another on one machine, which is replaced when a run has found a defect."""

    def __init__(self, *, shows_resumed: bool = False, make: Callable[[], Machine] = Machine) -> None:
        self._make = make
        self._shows_resumed = shows_resumed
        self._machine: Machine | None = None
        self._undisturbed: dict[str, Undisturbed] = {}
        self._count = 0
        self._latest: list[int] = []

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
            self._machine = None
            self._latest = []

    def exposed(self) -> list[Found]:
        """Where the secret of the flows is, in all that the machine has stored, written and shows."""
        return [] if self._machine is None else self._machine.exposed(self._latest)

    def outcomes(self, plans: Iterator[Plan]) -> Iterator[Outcome]:
        for one in plans:
            try:
                outcome = self.carry_out(one)
            except Exception as error:  # of the machine: the others are to be carried out nevertheless
                outcome = Outcome(one, defects=[f"not judged: {type(error).__name__}: {error}"])
            yield outcome
            if outcome.defects:
                self.close()

    def carry_out(self, plan: Plan) -> Outcome:
        """Runs a flow under the faults of a plan, and compares it with an undisturbed run."""
        undisturbed = self._undisturbed_run(plan.flow)
        machine = self._open()
        run = self._run(machine, plan.flow)
        outcome = Outcome(plan)
        scene = Scene(machine, random.Random(str(plan)), run.driver)
        try:
            run.start()
            for strike in plan.strikes:
                self._strike(strike, scene, run, undisturbed, outcome)
            run.until_over()
            outcome.defects += run.state().differences(undisturbed.state)
            found = _settled(machine, run.execution_id)
            self._latest = [*self._latest[1 - PAGED_EXECUTIONS :], run.execution_id]
            outcome.defects += found.defects
            outcome.swept = found.swept
        except AssertionError as error:
            outcome.defects.append(f"lost: {error}")
        finally:
            machine.heal()
            run.end()
        outcome.resumes, outcome.seconds = run.resumes, run.seconds
        if outcome.defects or outcome.seconds > SLOW_SECONDS or (self._shows_resumed and outcome.resumes):
            outcome.said = machine.said()
        return outcome

    def _strike(self, strike: Strike, scene: Scene, run: Run, undisturbed: Undisturbed, outcome: Outcome) -> None:
        hits: list[Hit] = []
        injected = threading.Event()

        def heal() -> None:
            injected.wait(INJECTING_SECONDS)
            for fault in strike.faults:
                fault.heal(scene)

        # in a thread of its own: a server that is stopped keeps this one waiting too
        healing = threading.Timer(strike.seconds, heal)

        def inject() -> None:
            healing.start()
            hits.extend(Hit(fault.name) for fault in strike.faults if fault.inject(scene))
            injected.set()

        hit_at(strike.moment, scene.machine, run.is_over, undisturbed.events, undisturbed.seconds, inject)
        if healing.ident is None:
            return
        while healing.is_alive():
            run.is_over()
            time.sleep(0.02)
        if not hits:
            return
        healed, before = time.monotonic(), None
        while not run.is_over():
            with suppress(psycopg2.OperationalError):
                newest, _ = run.events()
                before = newest if before is None else before
                if newest != before:
                    break
            assert time.monotonic() < healed + 60, f"no event for a minute after {strike}"
            time.sleep(0.02)
        for hit in hits:
            hit.recovery_seconds = time.monotonic() - healed
        outcome.hits += hits

    def _undisturbed_run(self, flow: Flow) -> Undisturbed:
        if flow.name not in self._undisturbed:
            machine = self._open()
            run = self._run(machine, flow)
            try:
                run.start()
                run.until_over()
                seconds, (_, events) = run.seconds, run.events()
                state, left = run.state(), _settled(machine, run.execution_id)
                assert not run.resumes, "it was resumed"
                assert not left.defects, left.defects
            except AssertionError as error:
                raise AssertionError(f"{flow.name}, undisturbed: {error}\n{run.said}") from None
            finally:
                run.end()
            self._undisturbed[flow.name] = Undisturbed(state, events, seconds)
        return self._undisturbed[flow.name]

    def _run(self, machine: Machine, flow: Flow) -> Run:
        self._count += 1
        return Run(machine, flow, self._count)

    def _open(self) -> Machine:
        if self._machine is None:
            self._machine = self._make()
            self._machine.open()
            self._machine.query(moments.SCHEMA)
        return self._machine


def _settled(machine: Machine, execution_id: int) -> Remains:
    """Returns what remains, once workers that were cut off have ended what they began for nothing."""
    deadline, swept = time.monotonic() + SETTLED_SECONDS, 0
    while True:
        try:
            found = asyncio.run(remains(machine.direct, execution_id))
        except StorageError:  # a server that was killed may take long to serve again
            if time.monotonic() > deadline:
                raise
            machine.start_servers()
            continue
        swept += found.swept
        if not found.defects or time.monotonic() > deadline:
            return Remains(found.defects, swept)
        time.sleep(0.5)
