"""The HTTP API from outside."""

from __future__ import annotations

import asyncio
import json
import textwrap
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from noetl_dagster import embedded
from noetl_dagster.events.transport.capacity import CapacityListener
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.events.transport.wire import message_of
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.launcher.executions import WarmLauncher
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import IDS, ended, started
from tests.playbooks import text_of
from tests.service.conftest import Service, samples, serving
from tests.waiting import until

PLAYBOOK = text_of(
    "served",
    """
    workload: {who: nobody}
    workflow:
      - step: start
        tool: {kind: python, input: {who: "{{ who }}"}, code: "result = {'hello': who, 'long': 'x' * 20_000}"}
    """,
)


async def running_execution(service: Service) -> int:
    event = started()
    await service.plane.engine.runtime.log.append([event])
    return event.execution_id


async def queue(service: Service, execution_id: int, index: int = 0, *, held: bool = False) -> Event:
    """Puts a command into the queue and returns its completion, not sent yet; ``held``: w1 has claimed it."""
    event = ended(execution_id, index)
    await service.plane.engine.runtime.pool.execute(
        "INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, context, worker_id, "
        "claim_event_id, status) VALUES ($1, $2, $3, 'step', 'noop', $4, $5, $6, $7)",
        execution_id,
        event.meta["command_id"],
        IDS.next(),
        {"step": "step", "index": index, "meta": event.meta},
        *(("w1", 1, "leased") if held else (None, None, "queued")),
    )
    return event


def claim_of(event: Event, *, worker_id: str = "w1") -> dict[str, Any]:
    """Returns a claim of nothing but the command of an event."""
    return {
        "worker_id": worker_id,
        "event_ids": [str(IDS.next())],
        "command_ids": [event.meta["command_id"]],
    }


async def test_events_go_into_the_log_once(service: Service) -> None:
    execution_id = await running_execution(service)
    messages = [message_of(await queue(service, execution_id, index, held=True)) for index in range(5)]
    first = await service.client.post("/api/events/batch", json={"events": messages})
    assert (first.status_code, first.json()) == (202, {"accepted": 5, "new": 5, "refused": []})
    again = await service.client.post("/api/events/batch", json={"events": messages})
    assert again.json() == {"accepted": 5, "new": 0, "refused": []}
    last = await queue(service, execution_id, 9, held=True)
    single = await service.client.post("/api/events", json=message_of(last))
    assert single.json() == {"accepted": 1, "new": 1, "refused": []}
    page = (await service.client.get(f"/api/executions/{execution_id}/events")).json()["events"]
    assert len(page) == 7
    assert {event["event_id"] for event in messages} < {event["event_id"] for event in page}
    assert {event["execution_id"] for event in page} == {str(execution_id)}
    nothing = await service.client.get(f"/api/executions/{IDS.next()}/events")
    assert nothing.status_code == 404
    lifecycle = (await service.client.get(f"/api/executions/{execution_id}/lifecycle")).json()["events"]
    assert lifecycle[0]["event_id"] == page[0]["event_id"]


async def test_what_is_no_event_of_a_worker_is_refused(service: Service) -> None:
    execution_id = await running_execution(service)
    routing = message_of(ended(execution_id, 0, event_type=EventType.PLAYBOOK_COMPLETED))
    response = await service.client.post("/api/events", json=routing)
    assert response.status_code == 422
    assert "may not emit" in response.json()["detail"]
    wide = message_of(ended(execution_id, 0)) | {"meta": {"command_id": "c", "iter_index": 0, "tasks": 2**64}}
    response = await service.client.post(
        "/api/events", content=json.dumps(wide), headers={"content-type": "application/json"}
    )
    assert response.status_code == 422
    assert "integers have at most 64 bits" in response.json()["detail"]
    unknown = await service.client.post("/api/events", json=message_of(ended(IDS.next(), 0)))
    assert unknown.status_code == 404


async def test_one_of_many_gets_the_claim(service: Service) -> None:
    execution_id = await running_execution(service)
    event = await queue(service, execution_id)
    bodies = [claim_of(event, worker_id=f"w{n}") for n in range(8)]
    answers = await asyncio.gather(*(service.client.post("/api/commands/claim", json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    [winner] = [body for body, answer in zip(bodies, answers, strict=True) if answer.json()["groups"]]
    repeated = await service.client.post("/api/commands/claim", json=winner)  # its answer was lost
    [group] = repeated.json()["groups"]
    [command] = group["commands"]
    assert command["claim"] == 1
    assert group["execution_id"] == str(execution_id)
    assert isinstance(command["event_id"], str)
    context = (await service.client.get(f"/api/commands/{event.meta['command_id']}")).json()
    assert context["context"]["step"] == "step"
    assert (await service.client.get(f"/api/commands/{context['event_id']}")).json() == context
    end = message_of(event) | {"worker_id": winner["worker_id"]}
    end["payload"]["parent_event_id"] = command["claim_event_id"]
    assert (await service.client.post("/api/events", json=end)).status_code == 202
    assert (await service.client.get(f"/api/commands/{event.meta['command_id']}")).status_code == 404
    claims = await service.plane.engine.runtime.pool.fetchval(
        "SELECT count(*) FROM noetl.event WHERE event_type = 'command.claimed'"
    )
    assert claims == 1


async def test_status_tells_of_the_pool(service: Service) -> None:
    execution_id = await running_execution(service)
    entered = [
        Event(execution_id, IDS.next(), EventType.STEP_ENTER, node_name=name, meta={"visit": 1, "epoch": 1})
        for name in ("step", "elsewhere")
    ]
    await service.plane.engine.runtime.log.append(entered)
    first, _ = [await queue(service, execution_id, index) for index in range(2)]
    await service.client.post("/api/commands/claim", json=claim_of(first))
    step, other = (await service.client.get(f"/api/executions/{execution_id}")).json()["steps"]
    assert (step["pool"]["waiting"], step["pool"]["running"], step["pool"]["rate"]) == (1, 1, None)
    assert step["pool"].keys() == {
        "waiting",
        "running",
        "rate",
        "unattended",
        "queue_p50",
        "queue_p99",
        "run_p50",
        "run_p99",
    }
    assert other["pool"] is None


async def test_no_claim_comes_in_after_the_cancellation(service: Service) -> None:
    execution_id = await running_execution(service)
    event = await queue(service, execution_id)
    claim = ended(execution_id, 0, event_type=EventType.COMMAND_CLAIMED, result=None, event_id=IDS.next())
    await service.client.post(f"/api/executions/{execution_id}/cancel")
    named = {"worker_id": "w1", "event_ids": [str(claim.event_id)], "command_ids": [event.meta["command_id"]]}
    answer = await service.client.post("/api/commands/claim", json=named)
    assert answer.json()["groups"] == []
    for path, body in (("", message_of(claim)), ("/batch", {"events": [message_of(claim)]})):
        refused = await service.client.post(f"/api/events{path}", json=body)
        assert refused.status_code == 422
        assert "a worker may not emit 'command.claimed'" in refused.text
    assert await service.plane.handler.handle_events([claim, event]) == {event.event_id}
    page = (await service.client.get(f"/api/executions/{execution_id}/events")).json()["events"]
    assert "command.claimed" not in {event["event_type"] for event in page}


async def test_an_execution_is_launched_followed_and_resolved(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "served.yaml").write_text(PLAYBOOK)
    async with serving(settings, playbooks_path=tmp_path) as service:
        client = service.client
        missing = await client.post("/api/executions/execute", json={"path": "../served"})
        assert missing.status_code == 404
        assert "NOETL_PLAYBOOKS_PATH" in missing.json()["detail"]
        misspelt = {"path": "tests/served", "payload": {"who": "Ada"}}
        assert (await client.post("/api/executions/execute", json=misspelt)).status_code == 422
        unknown = {"path": "tests/served", "runner": "airflow"}
        refused = await client.post("/api/executions/execute", json=unknown)
        assert refused.status_code == 422
        assert refused.json()["detail"] == "body.runner: Input should be 'dagster' or 'engine'"
        answer = await client.post("/api/executions/execute", json={"path": "tests/served", "workload": {"who": "Ada"}})
        assert answer.status_code == 202
        execution_id = answer.json()["execution_id"]
        accepted = (await client.get(f"/api/executions/{execution_id}")).json()
        assert (accepted["status"], accepted["workload"]) == ("RUNNING", {"who": "Ada"}), "known at once"
        found = await ended_execution(client, execution_id)
        assert found["status"] == "COMPLETED", found
        assert found["workload"]["who"] == "Ada"
        assert found["run_id"]
        listing = (await client.get("/api/executions")).json()["executions"]
        assert [entry["execution_id"] for entry in listing] == [execution_id]
        assert (await client.post(f"/api/executions/{execution_id}/cancel")).json()["cancelled"] is False
        pool = service.plane.engine.runtime.pool
        ref = await pool.fetchval("SELECT ref FROM noetl.result_ref WHERE source_step = 'start' LIMIT 1")
        resolved = (await client.get("/api/results/resolve", params={"ref": ref})).json()
        assert resolved["source_step"] == "start"
        content = await client.get("/api/results/content", params={"ref": ref})
        assert content.json()["hello"] == "Ada"


async def test_an_execution_of_a_partition(settings: Settings, tmp_path: Path) -> None:
    text = 'dagster: {partitions: {kind: daily, start: "2026-01-01", workload: who}}\n'
    (tmp_path / "served.yaml").write_text(PLAYBOOK.replace("workload:", text + "workload:", 1))
    own = settings.model_copy(update={"playbooks_path": tmp_path})
    async with serving(own) as service:
        wanted = {"path": "tests/served", "partition": "2025-12-31"}
        refused = await service.client.post("/api/executions/execute", json=wanted)
        assert refused.status_code == 422
        assert "has no partition '2025-12-31'" in refused.text
        answer = await service.client.post("/api/executions/execute", json=wanted | {"partition": "2026-01-05"})
        execution_id = answer.json()["execution_id"]
        found = await ended_execution(service.client, execution_id)
        assert (found["status"], found["workload"]) == ("COMPLETED", {"who": "2026-01-05"})
        made = "tests/served/start"
        for asked, count in (
            ({"partition": "2026-01-05"}, 1),
            ({"partition": "2026-01-06"}, 0),
            ({"asset": made}, 1),
            ({"asset": "tests/other"}, 0),
            ({"asset": made, "partition": "2026-01-05"}, 1),
            ({"asset": made, "partition": "2026-01-06"}, 0),
        ):
            listed = (await service.client.get("/api/executions", params=asked)).json()["executions"]
            assert [one["execution_id"] for one in listed] == [execution_id] * count, asked
            assert all(one["partition"] == "2026-01-05" for one in listed)


async def test_an_execution_is_cancelled_before_its_process_lives(settings: Settings, tmp_path: Path) -> None:
    endless = PLAYBOOK.replace("result =", "import time; time.sleep(600); result =")
    (tmp_path / "served.yaml").write_text(textwrap.dedent(endless))
    async with serving(settings, playbooks_path=tmp_path) as service:
        answer = await service.client.post("/api/executions/execute", json={"path": "tests/served"})
        execution = f"/api/executions/{answer.json()['execution_id']}"
        assert (await service.client.post(f"{execution}/cancel")).json()["cancelled"] is True
        launcher = service.plane.launcher
        assert isinstance(launcher, WarmLauncher)
        await until(lambda: not launcher.running, "the end of its run")
        found = (await service.client.get(execution)).json()
        assert found["status"] == "CANCELLED"
        assert all(step["status"] == "CANCELLED" for step in found["steps"]), "if it had begun after all"


async def test_an_execution_without_a_run_server_does_not_start_later(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "served.yaml").write_text(PLAYBOOK)
    async with serving(settings, playbooks_path=tmp_path) as service:
        embedded.run_server_folder(settings).write_text("no folder")
        answer = await service.client.post("/api/executions/execute", json={"path": "tests/served"})
        assert (answer.status_code, "did not start" in answer.json()["detail"]) == (503, True)
        [entry] = (await service.client.get("/api/executions")).json()["executions"]
        assert entry["status"] == "FAILED"


async def ended_execution(client: httpx.AsyncClient, execution_id: str) -> dict[str, Any]:
    async with asyncio.timeout(90):
        while True:
            response = await client.get(f"/api/executions/{execution_id}")
            if response.is_success and response.json()["status"] != "RUNNING":
                return response.json()  # type: ignore[no-any-return]
            await asyncio.sleep(0.3)


async def test_a_running_execution_is_cancelled(service: Service) -> None:
    execution_id = await running_execution(service)
    answer = await service.client.post(f"/api/executions/{execution_id}/cancel", json={"reason": "enough"})
    assert answer.json() == {"execution_id": str(execution_id), "cancelled": True}
    assert (await service.client.get(f"/api/executions/{execution_id}")).json()["status"] == "CANCELLED"
    assert (await service.client.post("/api/executions/12345/cancel")).status_code == 404


async def test_workers_register_and_are_listed(service: Service) -> None:
    report = {
        "worker_id": "w1",
        "slots": 4,
        "available_slots": 3,
        "active_tasks": 1,
        "tool_pools": {"spark": 1},
    }
    registered = await service.client.post("/api/workers", json=report)
    assert 0 <= registered.json()["node"] <= 1023
    [worker] = (await service.client.get("/api/workers")).json()["workers"]
    assert worker["report"]["available_slots"] == 3
    row = await service.plane.engine.runtime.pool.fetchrow("SELECT status, capacity FROM noetl.runtime")
    assert row["capacity"]["tool_pools"] == {"spark": 1}


async def test_reports_over_http_reach_those_who_dispatch(service: Service) -> None:
    client = await connect(service.settings, "test")
    listener = CapacityListener(client)
    await listener.open()
    await client.flush()
    await service.client.post("/api/workers", json={"worker_id": "w1", "slots": 4, "available_slots": 3})
    await until(lambda: listener.registry.targets(1, {"http"}) == ["w1"], "the report over NATS")
    await client.close()


async def test_health_and_metrics(service: Service) -> None:
    assert (await service.client.get("/health")).json() == {"status": "ok"}
    assert (await service.client.get("/ready")).status_code == 200
    execution_id = await running_execution(service)
    await queue(service, execution_id)
    await service.client.post("/api/events", json=message_of(await queue(service, execution_id, 5, held=True)))
    await service.client.post("/api/workers", json={"worker_id": 'w"1', "slots": 4, "active_tasks": 1})
    answer = await service.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert (
        samples(answer.text).items()
        >= {
            ("noetl_queue_depth", ("pool", "default")): 1,
            ("noetl_queue_active", ("pool", "default")): 0,
            ("noetl_ingest_lag_messages",): 0,
            ("noetl_ingest_latency_seconds_count",): 1,
            ("noetl_worker_utilisation", ("pool", "default"), ("worker_id", 'w"1')): 0.25,
            ("noetl_http_requests_total", ("method", "POST"), ("route", "/api/events"), ("status", "202")): 1,
        }.items()
    )


TOKENS = SecretStr('{"w-token": ["pool:default"], "r-token": ["reader"], "o-token": ["operator"]}')


SCOPES: list[tuple[str, str, set[str | None]]] = [
    ("POST", "/api/events/batch", {"w-token"}),
    ("POST", "/api/workers", {"w-token"}),
    ("POST", "/api/commands/claim", {"w-token"}),
    ("GET", "/api/commands/1", {"w-token", "r-token", "o-token"}),
    ("GET", "/api/executions", {"r-token", "o-token"}),
    ("POST", "/api/executions/1/cancel", {"o-token"}),
    ("POST", "/api/executions/execute", {"o-token"}),
    ("GET", "/api/workers", {"r-token", "o-token"}),
    ("POST", "/api/catalog", {"o-token"}),
    ("GET", "/api/catalog", {"r-token", "o-token"}),
    ("GET", "/metrics", {"r-token", "o-token"}),
    ("GET", "/health", {"w-token", "r-token", "o-token", "nonsense", None}),
]


async def test_scopes(settings: Settings) -> None:
    async with serving(settings, service_tokens=TOKENS) as service:
        for method, path, allowed in SCOPES:
            for token in ("w-token", "r-token", "o-token", "nonsense", None):
                headers = {"authorization": f"Bearer {token}"} if token else {}
                content = b"{}" if method == "POST" else None
                response = await service.client.request(method, path, headers=headers, content=content)
                refused = response.status_code in (401, 403)
                assert refused == (token not in allowed), (path, token, response.status_code)
                if token in ("nonsense", None) and refused:
                    assert response.headers["www-authenticate"] == "Bearer"


async def test_limits(settings: Settings) -> None:
    async with serving(settings, service_body_bytes=10_000, service_rate=5) as service:
        large = await service.client.post("/api/events/batch", content=b"x" * 10_001)
        assert large.status_code == 413

        async def chunks() -> Any:
            for _ in range(20):
                yield b" " * 1_000

        assert (await service.client.post("/api/events/batch", content=chunks())).status_code == 413
        answers = await asyncio.gather(*(service.client.get("/health") for _ in range(20)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert float(refused[0].headers["retry-after"]) > 0
