"""Without an index, a lock or a condition of the schema, the log differs from the model: the comparison can fail.

``scripts/mutations --area log`` runs all such defects; these are a sample that needs no process of its own.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from noetl_dagster.events.schema import schema_files
from noetl_dagster.settings import Settings
from tests.events.model.conformance import replay
from tests.events.model.rules import Model
from tests.events.model.states import Sizes
from tests.events.model.test_conformance import transaction

TABLE = Path(__file__).parents[2] / "mutations.toml"
CLAIMED = "enter 1 1, start 1 1 1, issue 1 0 1, enqueue 1 0 1, claim 1 0 1"
SAMPLE = {
    "an index": (
        "CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_loop_done_loop_id",
        f"{CLAIMED}, end 1 0 1 by 1 done, end_loop 1 1, end_loop 1 1",
    ),
    "the sender of an end": (
        "              AND CASE WHEN checked THEN\n",
        f"{CLAIMED}, lapse 1 0 1, reap, claim 1 0 1, end 1 0 1 by 1 done",
    ),
    "the id of a claim": (
        "            WHERE execution_id = id AND event_id BETWEEN lowest AND highest AND event_id = ANY(ids)",
        f"{CLAIMED}, lapse 1 0 1, reap, repeat 1 0 1 by 1",
    ),
}
"""What is replaced, and actions that notice it."""


def mutated_schema(text: str) -> str:
    """Returns the statements of the schema with the mutation that replaces a text."""
    mutations = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutation"]
    [to] = [mutation["to"] for mutation in mutations if mutation["from"] == text]
    schema = "\n".join(file.read_text(encoding="utf-8") for file in schema_files())
    assert schema.count(text) == 1
    return schema.replace(text, to)


@pytest.mark.parametrize(("text", "actions"), SAMPLE.values(), ids=SAMPLE)
def test_the_comparison_notices_a_defect_of_the_schema(settings: Settings, text: str, actions: str) -> None:
    model = Model(Sizes(claims=2, epochs=1))
    with transaction(settings) as (loop, pool):
        loop.run_until_complete(replay(settings, pool, model, actions))
        loop.run_until_complete(pool.execute("DROP SCHEMA noetl CASCADE"))
        loop.run_until_complete(pool.execute(mutated_schema(text)))
        with pytest.raises(AssertionError, match=r"the log .* the model"):
            loop.run_until_complete(replay(settings, pool, model, actions))
