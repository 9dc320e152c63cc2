"""The flows that faults hit: each takes seconds, and its results and targets do not depend on the execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2.extensions

from tests.playbooks import text_of

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Flow:
    """A playbook, and what it fills.

    Attributes:
        text: the file of the playbook; ``TARGET`` and ``FOLDER`` are a table and a folder of the run's own.
        prepare: SQL to run before.
        found: reads what it has filled, in an order that does not change; of a cursor on the log's database, the
            name of the table, and the folder.
        options: of ``noetl-dagster run``.
        settings: variables of the process that drives it.
        per_item: whether each run has the same iterations.
        parts: what faults may hit besides the driver and PostgreSQL.
        weight: how often it is taken.
    """

    name: str
    text: str
    prepare: str = ""
    found: Callable[[psycopg2.extensions.cursor, str, Path], Rows] | None = None
    options: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    per_item: bool = True
    parts: frozenset[str] = frozenset({"object_store"})
    weight: int = 1

    def uses(self, part: str) -> bool:
        """Whether a fault of this part can disturb the flow."""
        return part in self.parts or part in ("driver", "postgres")


ENGINE = ("--runner", "engine")
TOTAL = """
      - step: total
        tool: {kind: python, input: {items: "{{ fan.results }}"}, code: "result = [len(items), sum(item['n'] for item in items)]"}
"""
# results of odd items are stored, those of even items are in the log
ITEM = """
          kind: python
          input: {n: "{{ n }}"}
          code: |
            import time
            time.sleep(0.005)
            result = {'n': n, 'text': 'x' * (n % 2) * 9000}
"""


def fan(name: str, items: int, spec: str) -> str:
    return text_of(
        name,
        f"""
    workflow:
      - step: fan
        loop: {{in: "{{{{ range({items}) }}}}", iterator: n}}
        spec: {spec}
        tool:{ITEM}
        next: [total]{TOTAL}""",
    )


INLINE = fan("inline", 40, "{loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 8}}")
POOL = fan("pool", 60, "{loop_mode: fanout, fanout: {engine: workers, max_groups: 2, max_concurrent: 10}}")

OF_THE_POOL = frozenset({"object_store", "nats", "api", "ingestor", "reaper", "worker over nats", "worker over http"})

FLOWS = (
    Flow("inline", INLINE, options=ENGINE),
    Flow("dagster", INLINE.replace("inline", "in_dagster")),
    Flow("pool", POOL, options=ENGINE, parts=OF_THE_POOL, weight=3),
)
BY_NAME = {flow.name: flow for flow in FLOWS}
