"""Playbooks of the corpus come to the same when the commands of all their steps run in the pool of workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.verify import verify
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Dispatch, Playbook
from noetl_dagster.pool_worker.worker import PoolWorker
from noetl_dagster.settings import EventTransport, Settings
from tests.service.conftest import serving

from .expectation import Expectation, playbooks

pytestmark = pytest.mark.long

ALWAYS = {
    "arc_input",
    "cursor_loop",
    "cyclic_pagination",
    "failure_unhandled",
    "fanout_partial",
    "keychain_in_code",
    "large_result_by_reference",
    "loop_iter_set",
    "loop_sequential_ctx",
    "loop_sink",
    "nested_loops",
    "older_pagination_append",
    "older_retry_on_error",
    "policy_retry_until_ready",
    "step_scope",
    "sub_playbook_fails",
}


def chosen() -> list[object]:
    """The whole corpus; by default only a sample of it runs."""
    runnable = [path for path in playbooks() if not Expectation.of(path).refused]
    assert {path.stem for path in runnable} >= ALWAYS
    return [
        pytest.param(path, id=path.stem, marks=() if path.stem in ALWAYS else pytest.mark.slow) for path in runnable
    ]


def dispatched(path: Path) -> Playbook:
    """The playbook with ``dispatch: workers`` for all its steps."""
    text = path.read_text()
    if "\nexecutor:" in text:
        text = text.replace("\nexecutor:\n  spec:\n", "\nexecutor:\n  spec:\n    dispatch: workers\n")
        text = text.replace("\nexecutor: {spec: {", "\nexecutor: {spec: {dispatch: workers, ")
    else:
        text += "\nexecutor: {spec: {dispatch: workers}}\n"
    playbook = parse_playbook(text, file=str(path))
    assert all(step.spec.dispatch is Dispatch.WORKERS for step in playbook.steps)
    return playbook


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooled(corpus_settings: Settings) -> AsyncIterator[Engine]:
    """An engine whose commands a worker claims over HTTP and reports over NATS, in tasks of this process."""
    nats = corpus_settings.model_copy(update={"event_transport": EventTransport.NATS})
    async with serving(nats) as service:
        engine = await Engine.open(service.settings)
        worker = await PoolWorker.open(service.settings, "w1")
        stop = asyncio.Event()
        running = asyncio.create_task(worker.run(stop))
        yield engine
        stop.set()
        await running
        await worker.close()
        await engine.close()


IN_OP = """
SELECT DISTINCT claimed.node_name FROM noetl.event claimed
JOIN noetl.event issued USING (execution_id, node_name)
WHERE execution_id = $1 AND claimed.event_type = 'command.claimed' AND claimed.worker_id <> 'w1'
  AND issued.event_type = 'command.issued' AND issued.node_type <> 'playbook'
"""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", chosen())
async def test_it_comes_to_the_same_in_the_pool(path: Path, pooled: Engine, api: str) -> None:
    expected, playbook = Expectation.of(path), dispatched(path)
    given = expected.given | ({"api": api} if "api" in playbook.workload else {})
    state = await pooled.run(playbook, given)
    await expected.check(state, pooled.runtime)
    in_op = await pooled.runtime.pool.fetch(IN_OP, state.execution_id)
    assert not in_op, "only child playbooks run in the op"


@pytest.mark.asyncio(loop_scope="module")
async def test_all_of_it_verifies(pooled: Engine) -> None:
    report = await verify(pooled.runtime.pool, pooled.runtime.results)
    assert report.is_clean, str(report)
