"""The three transports, and pools that mix them, write the same log."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.pool import working
from tests.service.conftest import serving

TEXT = """
workload: {names: [ada, grace, edsger]}
workflow:
  - step: start
    spec: {dispatch: workers}
    tool: {kind: python, input: {names: "{{ names }}"}, code: "result = [name.upper() for name in names]"}
    next: [each]
  - step: each
    spec: {dispatch: workers}
    loop: {in: "{{ start.data }}", iterator: name, mode: parallel}
    tool:
      - first: {kind: python, input: {name: "{{ name }}"}, code: "result = {'name': name}"}
      - second:
          kind: python
          input: {found: "{{ first.name }}"}
          code: |
            if found == 'GRACE':
                raise ValueError('nobody')
            result = found * 3
          spec:
            policy:
              rules:
                - when: "{{ error is defined and error }}"
                  then: {do: continue, set: {ctx.missing: "{{ name }}"}}
    next: [shards]
  - step: shards
    spec: {loop_mode: fanout, dispatch: workers, fanout: {max_shard_retries: 1, allow_partial: true}}
    loop: {in: [1, 0], iterator: n}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = 1 / n"}
    next: [end]
  - step: end
    tool: {kind: python, input: {missing: "{{ ctx.missing }}"}, code: "result = missing"}
"""
VOLATILE = {
    "catalog_id",
    "loop_id",
    "duration_ms",
    "waited",
    "ms",
    "shard_id",
    "continues",
    "collection_ref",
    "collection_reference",
}


async def log_of(settings: Settings, kinds: list[EventTransport]) -> Counter[str]:
    """The events of the playbook, run by workers of these transports, without ids and times."""
    async with serving(settings) as service:
        own = service.settings
        engine = await Engine.open(own.model_copy(update={"event_transport": kinds[0]}))
        async with working(own, "w0", event_transport=kinds[0]):
            if len(kinds) > 1:
                async with working(own, "w1", event_transport=kinds[1]):
                    state = await engine.run(playbook(TEXT))
            else:
                state = await engine.run(playbook(TEXT))
        assert state.status is ExecutionStatus.COMPLETED, state.error
        assert state.latest["end"].envelope["data"] == "GRACE"
        events = [event async for event in engine.runtime.log.events(state.execution_id)]
        await engine.close()
    return Counter(
        repr(
            (
                event.event_type,
                event.node_name,
                event.node_type,
                event.status,
                event.error,
                event.current_index,
                event.current_item,
                event.worker_id in ("w0", "w1"),
                plain(event.meta, state.execution_id),
                plain(event.context, state.execution_id),
                plain(event.result, state.execution_id),
            )
        )
        for event in events
    )


def plain(value: Any, execution_id: int) -> Any:
    """A part of an event without what differs from run to run."""
    if isinstance(value, dict):
        return {key: plain(inner, execution_id) for key, inner in sorted(value.items()) if key not in VOLATILE}
    if isinstance(value, list):
        return [plain(inner, execution_id) for inner in value]
    return value.replace(str(execution_id), "<execution>") if isinstance(value, str) else value


@pytest.fixture(scope="module")
def expected() -> dict[str, Counter[str]]:
    """The log of the first transport, for the others to be compared with."""
    return {}


@pytest.mark.parametrize(
    "kinds",
    [
        [EventTransport.DIRECT],
        [EventTransport.HTTP],
        [EventTransport.NATS],
        [EventTransport.NATS, EventTransport.HTTP],
    ],
    ids="+".join,
)
async def test_logs_are_the_same(
    settings: Settings, expected: dict[str, Counter[str]], kinds: list[EventTransport]
) -> None:
    found = await log_of(settings, kinds)
    reference = expected.setdefault("log", found)
    assert found - reference == Counter()
    assert reference - found == Counter()
