"""What ``loop.started`` says of a collection that is stored instead of written into the event."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from noetl_dagster.storage import locations
from tests.playbooks import playbook

FLOW = """
    workload: {items: [], count: 0}
    workflow:
      - step: start
        loop: {in: "{{ workload.items }}", iterator: item}
        tool: {kind: noop}
"""
STARTED = "SELECT context FROM noetl.event WHERE execution_id = $1 AND event_type = 'loop.started'"


@pytest.mark.parametrize(("count", "stored"), [(10, False), (11, True)])
async def test_collections_above_the_threshold_are_objects(settings: Settings, count: int, stored: bool) -> None:
    engine = await Engine.open(settings.model_copy(update={"loop_collection_threshold": 10}))
    try:
        items = [{"id": number} for number in range(count)]
        state = await engine.run(playbook(FLOW), {"items": items})
        context = await engine.runtime.pool.fetchval(STARTED, state.execution_id)
        assert ("collection_ref" in context) is stored
        if not stored:
            assert context["collection"] == items
            return
        results = engine.runtime.results
        reference = await results.find(context["collection_reference"]["ref"])
        assert await results.get(reference) == items
        folder = f"s3://{settings.minio_bucket}/exec/{state.execution_id}/"
        assert context["collection_ref"].startswith(folder)
        index = orjson.loads(await asyncio.to_thread(locations.read_bytes, settings, context["collection_ref"]))
        parts = [part.physical_uri async for part in results.parts(reference)]
        assert index == {"collection_size": count, "part_items": context["part_items"], "parts": parts}
        assert all(uri.startswith(folder) for uri in parts)
        assert await asyncio.to_thread(locations.read_bytes, settings, parts[0])
    finally:
        await engine.close()
