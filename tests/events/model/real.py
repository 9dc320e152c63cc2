"""The real log, driven by the actions of the model: the same code that drivers, workers and the reaper run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from noetl_dagster.engine.executions.lifecycle import Lifecycle
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.engine.pool.reaper import Reaper
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionCancelledError, ExecutionStateError
from noetl_dagster.events.ids import command_id
from noetl_dagster.events.state import STATUS_OF_END, ExecutionState
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.dead_letters import DeadLetters
from noetl_dagster.events.transport.nats import NatsNames
from noetl_dagster.events.transport.wire import EventLimits, encode_event
from noetl_dagster.events.types import COMMAND_ENDS, Event, EventType
from noetl_dagster.settings import Settings
from noetl_dagster.worker.command import Command, CommandEvents, Outcome
from noetl_dagster.worker.context import Shared, own_context
from tests.events.model.states import CANCELLED, DONE, FAILED, Action, Fact, Place, Row, Sizes, State
from tests.playbooks import playbook

TEXT = """
workload: {again: false}
workflow: [{step: work, tool: {kind: noop}, next: [{step: work, when: "{{ again }}"}]}]
"""
LEASE = 600.0
LAPSE = "UPDATE noetl.queue SET lease_until = now() - interval '1 s' WHERE execution_id = $1 AND command_id = $2"
EVENTS = """
SELECT event_type, event_id, parent_event_id, status, meta FROM noetl.event WHERE execution_id = $1 ORDER BY event_id
"""
ROWS = """
SELECT command_id, status, claim_event_id, attempts, max_attempts, lease_until < now() AS is_due
FROM noetl.queue WHERE execution_id = $1
"""
LETTERS = "SELECT dead_letter_id, message_id FROM noetl.dead_letter WHERE source = $1"
ENDS_OF_EPOCHS = {
    EventType.PLAYBOOK_COMPLETED: "completed",
    EventType.PLAYBOOK_FAILED: "failed",
    EventType.EXECUTION_CANCELLED: CANCELLED,
}


class Claim(NamedTuple):
    """The event of a claim, and its worker."""

    event_id: int
    worker: str

    @property
    def request(self) -> tuple[str, list[int]]:
        """The worker and the ids that it sends."""
        return self.worker, [self.event_id]


class RealLog:
    """Performs actions on an execution, and reads its state as the model has it.

    Args:
        pool: where statements run.
        execution_id: of an execution that :meth:`create` made.
        fanout: the loop is a fan-out, whose ends are other events.
        by_name: claims name their command.
        same_claim: the claim that all claims repeat.

    Attributes:
        claims: the claims that the model numbers.
    """

    def __init__(
        self, settings: Settings, pool: Any, sizes: Sizes, *, fanout: bool = False, by_name: bool = True, node: int = 5
    ) -> None:
        self.pool = pool
        self.runtime = Runtime(settings, pool, node)
        self.lifecycle = Lifecycle(self.runtime, Liveness("", self.runtime.pool))
        self.execution_id = 0
        self.claims: dict[tuple[Place, int], Claim] = {}
        self._sizes = sizes
        self.fanout = fanout
        self.by_name = by_name
        self.same_claim: Claim | None = None
        self._claims = Claims(pool, LEASE)
        self._reaper = Reaper(pool, self.runtime.handler, self.runtime.commands)
        self._names = NatsNames(settings)
        self._letters = DeadLetters(self.runtime.handler, self._names, EventLimits.of(settings))
        self._messages: dict[tuple[int, str, str], Event] = {}

    async def create(self) -> None:
        """Starts the execution, in a pool of its own."""
        created = await self.lifecycle.create(playbook(TEXT))
        self.execution_id, self.claims = created.id, {}

    def beside(self, other: RealLog) -> None:
        """Continues the execution of another one, as another process."""
        self.execution_id, self.claims = other.execution_id, dict(other.claims)
        self.same_claim = other.same_claim
        self._messages = other._messages

    async def perform(self, action: Action) -> str:
        """Performs an action and returns its result."""
        result: str = await getattr(self, f"_{action.name}")(action)
        return result

    async def status(self) -> tuple[str, dict[int, str]]:
        """Returns the status that processes fold from the log, and how each visit ended."""
        state = await self.runtime.state(self.execution_id)
        ends = {visit: state.end_of("work", visit) for _, visit in state.ends}
        exits = {visit: FAILED if end.status == "FAILED" else DONE for visit, end in ends.items() if end is not None}
        return state.status.lower(), exits

    # what drivers do

    async def _append(self, type_: EventType, meta: dict[str, Any], status: str | None = None) -> str:
        event = Event(self.execution_id, self.runtime.ids.next(), type_, node_name="work", status=status, meta=meta)
        if type_ is EventType.STEP_EXIT:
            event.result = {"status": "error" if status == "FAILED" else "ok"}
        return "new" if await self.runtime.log.append_once(event) else "known"

    async def _enter(self, action: Action) -> str:
        visit, epoch = action.place
        return await self._append(EventType.STEP_ENTER, {"visit": visit, "epoch": epoch, "turn": 1})

    async def _start(self, action: Action) -> str:
        visit, run, epoch = action.place
        type_ = EventType.LOOP_FANOUT_STARTED if self.fanout else EventType.LOOP_STARTED
        return await self._append(type_, {"loop_id": f"{visit}.{run}", "visit": visit, "epoch": epoch})

    async def _issue(self, action: Action) -> str:
        event = self.runtime.commands.issued(self._command(action.place), "noop")
        try:
            return "new" if await self.runtime.log.append([event]) else "known"
        except ExecutionCancelledError:
            return "refused"

    async def issue_all(self, actions: list[Action]) -> list[str]:
        """Issues several commands at once."""
        events = [self.runtime.commands.issued(self._command(action.place), "noop") for action in actions]
        try:
            new = await self.runtime.log.append(events)
        except ExecutionCancelledError:
            return ["refused"] * len(events)
        return ["new" if event.event_id in new else "known" for event in events]

    async def _enqueue(self, action: Action) -> str:
        command = self._command(action.place)
        row = (command.command_id, own_context(command), 1, self.execution_id, "work", "noop",
               self._sizes.claims, 0, 1.0, self._pool_name, Shared.of(command).context())  # fmt: skip
        found = await self.pool.fetch(queries.ENQUEUE, *([value] for value in row))
        return "queued" if found else "nothing"

    async def _withdraw(self, action: Action) -> str:
        name = self._command(action.place).command_id
        return (
            "withdrawn"
            if await self.pool.execute(queries.WITHDRAW, self.execution_id, name) == "DELETE 1"
            else "nothing"
        )

    async def _end_loop(self, action: Action) -> str:
        visit, run = action.place
        type_ = EventType.LOOP_FANIN_COMPLETED if self.fanout else EventType.LOOP_DONE
        return await self._append(type_, {"loop_id": f"{visit}.{run}"})

    async def _exit(self, action: Action) -> str:
        visit, epoch = action.place
        failed = action.outcome == FAILED
        fired = ["work"] if not failed and visit < self._sizes.visits else []
        meta = {"visit": visit, "epoch": epoch, "fired": fired} | ({"unhandled": True} if failed else {})
        try:
            return await self._append(EventType.STEP_EXIT, meta, "FAILED" if failed else "COMPLETED")
        except ExecutionCancelledError:
            return "refused"

    async def _finish(self, action: Action) -> str:
        """Ends an epoch, by a driver that has not read of later ones or of its end."""
        [epoch] = action.place
        events = [
            event
            for event in await self.runtime.log.lifecycle(self.execution_id)
            if event.event_type not in STATUS_OF_END and event.meta.get("epoch", 1) <= epoch
        ]
        execution = await self.runtime.assemble(ExecutionState.fold(self.execution_id, events))
        return (await self.lifecycle.finish_if_over(execution)).lower()

    async def _resume(self, action: Action) -> str:
        try:
            await self.lifecycle.resume(self.execution_id, after=action.place[0])
        except ExecutionStateError:
            return "refused"
        return "new"

    async def _cancel(self, action: Action) -> str:
        return "new" if await self.lifecycle.cancel(self.execution_id) else "too late"

    # what workers and the reaper do

    async def _claim(self, action: Action) -> str:
        number = sum(place == action.place for place, _ in self.claims) + 1
        claim, name = self._new_claim(number), self._command(action.place).command_id
        granted = await self._claims.claim(*claim.request, pool=self._pool_name, only=[name] if self.by_name else None)
        if not granted:
            return "nothing"
        self.claims[action.place, number] = claim
        return "claimed"

    async def claim_any(self) -> Place | None:
        """Claims the command that is next, and returns it."""
        claim = self._new_claim(len(self.claims))
        granted = await self._claims.claim(*claim.request, pool=self._pool_name)
        if not granted:
            return None
        [name] = [place for place in self._places if f'"{self._command(place).command_id}"' in granted[0].answer]
        self.claims[name, sum(place == name for place, _ in self.claims) + 1] = claim
        return name

    async def _repeat(self, action: Action) -> str:
        claim = self.claims[action.place, action.claim]
        granted = await self._claims.claim(*claim.request, pool=self._pool_name)
        return "claimed" if granted else "nothing"

    async def _release(self, action: Action) -> str:
        claim = self.claims[action.place, action.claim]
        return "released" if await self._claims.release(*claim.request, self._pool_name) else "nothing"

    async def _end(self, action: Action) -> str:
        return (await self.send([action]))[0]

    async def _beat(self, action: Action) -> str:
        return (await self.send([action]))[0]

    async def _chunk(self, action: Action) -> str:
        return (await self.send([action]))[0]

    async def send(self, actions: list[Action]) -> list[str]:
        """Delivers messages of workers in one batch; the same action is the same message."""
        events = [self._message(action) for action in actions]
        taken = await self.runtime.handler.take_events(events, [self._pool_name])
        return [
            "new" if one.event_id in taken.new else "refused" if one.event_id in taken.refused else "known"
            for one in events
        ]

    async def _lapse(self, action: Action) -> str:
        await self.pool.execute(LAPSE, self.execution_id, self._command(action.place).command_id)
        return ""

    async def _reap(self, action: Action) -> str:
        reaped = await self._reaper.reap()
        return f"{len(reaped.requeued)} queued, {len(reaped.failed)} failed"

    async def _bury(self, action: Action) -> str:
        event, name = self._message(action._replace(name="end", outcome=DONE)), _letter(action.place, action.claim)
        subject = self._names.event_subject(self._pool_name, event.worker_id or "", self.execution_id, event.event_type)
        row = (self._source, subject, encode_event(event), "refused", 1, name)
        await self.pool.execute(queries.PUT_DEAD_LETTER, *row)
        return ""

    async def _unearth(self, action: Action) -> str:
        letters = {row["message_id"]: row["dead_letter_id"] for row in await self.pool.fetch(LETTERS, self._source)}
        letter = letters.get(_letter(action.place, action.claim))
        done = None if letter is None else await self._letters.reprocess(letter)
        if done is None:
            return "gone"
        return "refused" if done.error else "new" if done.new else "known"

    # what the log and the queue hold

    async def state(self, like: State) -> State:
        """Reads the log and the queue; what the bounds allow is that of another state."""
        events = await self.pool.fetch(EVENTS, self.execution_id)
        rows = await self.pool.fetch(ROWS, self.execution_id)
        numbers: dict[int, int] = {}
        counts: dict[str, int] = {}
        for event in events:
            if event["event_type"] == EventType.COMMAND_CLAIMED:
                name = event["meta"]["command_id"]
                numbers[event["event_id"]] = counts[name] = counts.get(name, 0) + 1
        facts = [fact for event in events for fact in self._facts(event, numbers)]
        if self._sizes.extras:
            for letter in await self.pool.fetch(LETTERS, self._source):
                *place, claim = map(int, letter["message_id"].split("/"))
                facts.append(Fact("letter", tuple(place), claim))
        queued = [
            Row(_place(row["command_id"]), numbers.get(row["claim_event_id"], 0), row["status"] == "leased",
                bool(row["is_due"]), row["attempts"], row["max_attempts"])
            for row in rows
        ]  # fmt: skip
        return like._replace(log=tuple(sorted(facts)), rows=tuple(sorted(queued)))

    def _facts(self, event: Any, numbers: dict[int, int]) -> list[Fact]:
        type_, meta = EventType(event["event_type"]), event["meta"]
        place = _place(meta["command_id"]) if "command_id" in meta else ()
        claim = numbers.get(event["parent_event_id"], 0)
        visit_and_epoch = (meta.get("visit", 0), meta.get("epoch", 0))
        loop = tuple(map(int, meta["loop_id"].split("."))) if "loop_id" in meta else ()
        if type_ in COMMAND_ENDS:
            return [Fact("ended", place, claim, DONE if event["status"] == "COMPLETED" else FAILED)]
        if type_ in ENDS_OF_EPOCHS:
            return [Fact("over", (meta["epoch"],), outcome=ENDS_OF_EPOCHS[type_])]
        match type_:
            case EventType.COMMAND_ISSUED:
                return [Fact("issued", place)]
            case EventType.COMMAND_CLAIMED:
                return [Fact("claimed", place, numbers[event["event_id"]])]
            case EventType.CALL_PARTIAL:
                return [Fact("chunk", place[:2], place[2], str(claim))]
            case EventType.LOOP_STARTED | EventType.LOOP_FANOUT_STARTED:
                return [Fact("started", (*loop, meta["epoch"]))]
            case EventType.LOOP_DONE | EventType.LOOP_FANIN_COMPLETED:
                return [Fact("loop", loop)]
            case EventType.STEP_ENTER:
                return [Fact("entered", visit_and_epoch)]
            case EventType.STEP_EXIT:
                return [Fact("exited", visit_and_epoch, outcome=FAILED if event["status"] == "FAILED" else DONE)]
            case EventType.EXECUTION_RESUMED:
                return [Fact("resumed", (meta["epoch"],))]
        return []

    def _new_claim(self, number: int) -> Claim:
        """Returns a claim of a worker that takes a command twice, before another one does."""
        return self.same_claim or Claim(self.runtime.ids.next(), f"w{(number - 1) // 2}")

    @property
    def _pool_name(self) -> str:
        return f"of-{self.execution_id}"

    @property
    def _source(self) -> str:
        return f"model-{self.execution_id}"

    @property
    def _places(self) -> list[Place]:
        visits, items = range(1, self._sizes.visits + 1), range(self._sizes.items)
        attempts = range(1, self._sizes.attempts + self._sizes.epochs)
        return [(visit, index, attempt) for visit in visits for index in items for attempt in attempts]

    def _command(self, place: Place) -> Command:
        visit, index, attempt = place
        return Command(
            self.execution_id, "work", visit, attempt, index, loop_id=f"{visit}.1", length=self._sizes.items,
            shard=self.fanout,
        )  # fmt: skip

    def _message(self, action: Action) -> Event:
        claim = self.claims[action.place, action.claim]
        key = claim.event_id, action.name, action.outcome
        if action.name != "beat" and key in self._messages:
            return self._messages[key]
        command = replace(self._command(action.place), claim=claim.event_id)
        made = CommandEvents(self.runtime.ids, claim.worker)
        match action.name:
            case "beat":
                return made.heartbeat(command)
            case "chunk":
                chunk = {"chunk_index": command.index, "has_more": True, "row_count": 1}
                event = made.partial(command, {"status": "ok", "data": 1}, chunk)
            case _:
                envelope = {"status": "ok", "data": 1} if action.outcome == DONE else _FAILURE
                event = made.ended(command, Outcome(dict(envelope)))
        self._messages[key] = event
        return event


_FAILURE: dict[str, Any] = {"status": "error", "error": {"kind": "unknown", "message": "failed", "retryable": False}}


def _place(name: str) -> Place:
    execution_id, _, *numbers = name.split(":")
    place = tuple(map(int, numbers))
    assert command_id(int(execution_id), "work", *place) == name
    return place


def _letter(place: Place, claim: int) -> str:
    return "/".join(map(str, (*place, claim)))
