"""The flows that faults hit: each takes seconds, and its results and targets do not depend on the execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from noetl_dagster.extras import shipped_folder
from noetl_dagster.storage.tiers.objects import minio_store
from tests.chaos.machine import Machine
from tests.playbooks import text_of

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Flow:
    """A playbook, and what it fills.

    Attributes:
        text: the file of the playbook; ``TARGET`` and ``FOLDER`` are a table and a folder of the run's own.
        prepare: SQL to run before.
        found: reads what it has filled, of a machine, the name of the table, and the folder.
        options: of ``noetl-dagster run``.
        settings: variables of the process that drives it.
        per_item: whether each run has the same iterations.
        parts: what faults may hit besides the driver and PostgreSQL.
        beside: files that the playbook needs beside it.
        weight: how often it is taken.
    """

    name: str
    text: str
    prepare: str = ""
    found: Callable[[Machine, str, Path], Rows] | None = None
    options: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    per_item: bool = True
    parts: frozenset[str] = frozenset({"object_store"})
    beside: tuple[Path, ...] = ()
    weight: int = 2

    @property
    def starts_jvm(self) -> bool:
        return "jvm" in self.parts

    def uses(self, part: str) -> bool:
        """Whether a fault of this part can disturb the flow."""
        return part in self.parts or part in ("driver", "postgres")


ENGINE = ("--runner", "engine")
VAULT = "keychain: [{name: vault, credential: vault}]"
TOTAL = """
      - step: total
        tool: {kind: python, input: {items: "{{ fan.results }}"}, code: "result = [len(items), sum(item['n'] for item in items)]"}
"""
# results of odd items are stored, those of even items are in the log
ITEM = """
          kind: python
          input: {n: "{{ n }}", pin: "{{ keychain.vault.pin }}"}
          code: |
            import time
            print(pin)
            time.sleep(0.005)
            result = {'n': n, 'text': 'x' * (n % 2) * 9000}
"""


def fan(name: str, items: int, spec: str) -> str:
    return text_of(
        name,
        f"""
    {VAULT}
    workflow:
      - step: fan
        loop: {{in: "{{{{ range({items}) }}}}", iterator: n}}
        spec: {spec}
        tool:{ITEM}
        next: [total]{TOTAL}""",
    )


INLINE = fan("inline", 40, "{loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 8}}")
HELPERS = fan("helpers", 600, "{loop_mode: fanout, fanout: {max_groups: 4, max_concurrent: 4}}")
POOL = fan("pool", 60, "{loop_mode: fanout, fanout: {engine: workers, max_groups: 2, max_concurrent: 10}}")

LOOP = "{mode: parallel, max_in_flight: 4}"
NUMBER = (
    """{kind: python, input: {n: "{{ n }}", pin: "{{ keychain.vault.pin }}"}, """
    """code: "import time; print(pin); time.sleep(0.01); result = {'n': n}"}"""
)
SINKS = text_of(
    "sinks",
    f"""
    {VAULT}
    workflow:
      - step: start
        tool: {{kind: noop}}
        next: {{spec: {{mode: inclusive}}, arcs: [{{step: rows}}, {{step: files}}, {{step: objects}}, {{step: staged}}]}}
      - step: rows
        loop: {{in: "{{{{ range(20) }}}}", iterator: n, spec: {LOOP}}}
        tool: {NUMBER}
        sink: {{tool: postgres, auth: pg, table: TARGET}}
      - step: files
        loop: {{in: "{{{{ range(20) }}}}", iterator: n, spec: {LOOP}}}
        tool: {NUMBER}
        sink: {{tool: file, path: "FOLDER/files"}}
      - step: objects
        loop: {{in: "{{{{ range(20) }}}}", iterator: n, spec: {LOOP}}}
        tool: {NUMBER}
        sink: {{tool: minio, path: TARGET, format: jsonl}}
      - step: staged
        loop: {{in: "{{{{ range(20) }}}}", iterator: n, spec: {LOOP}}}
        tool: {NUMBER}
        sink: {{tool: duckdb, database: "FOLDER/rows.duckdb", table: numbers}}
    """,
)
CURSOR = text_of(
    "cursor",
    """
    workflow:
      - step: chores
        loop:
          cursor:
            kind: postgres
            auth: pg
            claim: |
              UPDATE TARGET_chores SET state = 'claimed' WHERE n IN (
                SELECT n FROM TARGET_chores WHERE state = 'new' LIMIT 3 FOR UPDATE SKIP LOCKED) RETURNING n
            release: UPDATE TARGET_chores SET state = 'new' WHERE n = :n
          iterator: claimed
          spec: {mode: cursor, max_in_flight: 2, frame: {process: frame}}
        tool: {kind: python, input: {claimed: "{{ claimed }}"}, code: "import time; time.sleep(0.03); result = claimed"}
        sink: {tool: postgres, auth: pg, table: TARGET}
    """,
)
STREAM = text_of(
    "stream",
    """
    workflow:
      - step: read
        tool: {kind: postgres, auth: pg, command: SELECT n FROM TARGET_source ORDER BY n, as: rows, chunk_size: 100, key: n}
        next: [{step: double, on: call.partial}, {step: count}]
      - step: double
        loop: {spec: {max_in_flight: 2}}
        tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "import time; time.sleep(0.02); result = [{'n': 2 * row['n']} for row in rows]"}
        next: [{step: load, on: call.partial}]
      - step: load
        tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = rows"}
        sink: {tool: postgres, auth: pg, table: TARGET}
        next: [count]
      - step: count
        tool: {kind: python, input: {rows: "{{ read.row_count }}", sinks: "{{ load.done }}"}, code: "result = [rows, sinks]"}
    """,
)


def rows_of(machine: Machine, table: str, _: Path) -> Rows:
    return machine.query(f"SELECT n FROM {table}")


def all_sinks(machine: Machine, table: str, folder: Path) -> Rows:
    store = minio_store(machine.direct)
    objects = [bytes(store.get(one["path"]).bytes()).decode() for page in store.list(table) for one in page]
    files = duckdb.sql(f"SELECT n FROM read_parquet('{folder}/files/*.parquet')").fetchall()
    with duckdb.connect(str(folder / "rows.duckdb")) as connection:
        staged = connection.execute("SELECT n FROM numbers").fetchall()
    left = [(path.name,) for path in folder.rglob("_staged/*") if path.is_file()]
    found = {"row": rows_of(machine, table, folder), "file": files, "staged": staged, "left": left}
    lines = [("object", line) for text in objects for line in text.splitlines()]
    return [*lines, *((where, *row) for where, rows in found.items() for row in rows)]


def all_chores(machine: Machine, table: str, folder: Path) -> Rows:
    return rows_of(machine, table, folder) + machine.query(f"SELECT n, state FROM {table}_chores")


OF_THE_POOL = frozenset({"object_store", "nats", "api", "ingestor", "worker over nats", "worker over http"})

PATIENTS = shipped_folder("playbooks") / "patient_flow.yaml"
VALIDATION = """
SELECT facility_id, seeded, assessments, conditions, medications, vital_signs, demographics, records, missing::text
FROM patient_flow.validation WHERE execution_id = (SELECT max(execution_id) FROM patient_flow.validation)
"""


def validated(machine: Machine, _table: str, _folder: Path) -> Rows:
    return machine.query(VALIDATION)


FLOWS = (
    Flow("inline", INLINE, options=ENGINE),
    Flow(
        "dagster",
        INLINE.replace("inline", "in_dagster"),
        settings={"NOETL_DEFAULT_STORE_TIER": "pvc"},
        parts=frozenset({"pvc"}),
    ),
    Flow("helpers", HELPERS, options=ENGINE, settings={"NOETL_RUN_PROCESSES": "2"}, parts=frozenset({"helper"})),
    Flow("sinks", SINKS, prepare="CREATE TABLE TARGET (n int)", found=all_sinks, options=ENGINE),
    Flow(
        "cursor",
        CURSOR,
        prepare="CREATE TABLE TARGET (n int); CREATE TABLE TARGET_chores AS "
        "SELECT n, 'new' AS state FROM generate_series(1, 60) AS n",
        found=all_chores,
        options=ENGINE,
        per_item=False,
    ),
    Flow(
        "stream",
        STREAM,
        prepare="CREATE TABLE TARGET (n int); CREATE TABLE TARGET_source AS SELECT n FROM generate_series(1, 1050) AS n",
        found=rows_of,
        options=ENGINE,
    ),
    Flow(
        "patient_flow",
        PATIENTS.read_text(),
        beside=(PATIENTS.with_name("patient_flow_spark.py"),),
        found=validated,
        options=(*ENGINE, "--set", "facilities=2", "--set", "patients=6", "--set", "batch_size=3"),
        settings={
            "NOETL_SPARK_MASTER": "local[2]",
            "NOETL_SPARK_DRIVER_MEMORY": "512m",
            "NOETL_SPARK_DRIVER_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
        per_item=False,
        parts=frozenset({"object_store", "nats", "jvm"}),
        weight=1,
    ),
    Flow("pool", POOL, options=ENGINE, parts=OF_THE_POOL, weight=6),
)
BY_NAME = {flow.name: flow for flow in FLOWS}
