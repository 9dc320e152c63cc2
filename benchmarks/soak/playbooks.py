"""The playbooks of the soak test. Each one that gathers results fails if an item is missing or came twice."""

from __future__ import annotations

from pathlib import Path

SCHEMA = """
CREATE TABLE soak_job (execution text, id int, state text NOT NULL DEFAULT 'new', result int);
CREATE INDEX ON soak_job (execution, state, id);
CREATE TABLE soak_row (execution text, id int, cents int);
CREATE INDEX ON soak_row (execution);
"""

_ALL = """
        assert sorted(found) == list(range(n)), f"{n} items expected, {len(found)} found"
        result = n"""

LOOP = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: loop, path: soak/loop}
workload: {n: 100, pause: 0.01}
workflow:
  - step: items
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = list(range(n))"}
    next: [each]
  - step: each
    loop: {in: "{{ items.data }}", iterator: one}
    spec: {loop_mode: fanout, fanout: {max_groups: 1, max_concurrent: 8}}
    tool:
      kind: python
      input: {one: "{{ one }}", pause: "{{ pause }}"}
      code: "import time; time.sleep(pause); result = one"
"""

PARALLEL = (
    LOOP.replace("loop, path: soak/loop", "parallel, path: soak/parallel")
    .replace("iterator: one}", "iterator: one, spec: {mode: parallel, max_in_flight: 8}}")
    .replace("    spec: {loop_mode: fanout, fanout: {max_groups: 1, max_concurrent: 8}}\n", "")
)

POOL = f"""
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: pool, path: soak/pool}}
workload: {{n: 20, pause: 0.5}}
workflow:
  - step: each
    loop: {{in: "{{{{ range(n) }}}}", iterator: one}}
    spec: {{loop_mode: fanout, fanout: {{engine: workers, max_groups: 1, max_concurrent: 4}}}}
    tool:
      kind: python
      input: {{one: "{{{{ one }}}}", pause: "{{{{ pause }}}}"}}
      code: "import time; time.sleep(pause); result = one"
    next: [check]
  - step: check
    tool:
      kind: python
      input: {{found: "{{{{ each.results }}}}", n: "{{{{ n }}}}"}}
      code: |{_ALL}
"""

SMALL = f"""
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: small, path: soak/small}}
workload: {{n: 5000}}
workflow:
  - step: make
    tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "result = list(range(n))"}}
    next: [check]
  - step: check
    tool:
      kind: python
      input: {{found: "{{{{ make.data }}}}", n: "{{{{ n }}}}"}}
      code: |{_ALL}
"""

_OWN_ROWS = """
  - step: count
    tool:
      kind: postgres
      command: "SELECT id FROM {table} WHERE execution = :execution {condition}"
      params: {{execution: "{{{{ execution_id }}}}"}}
    next: [check]
  - step: check
    tool:
      kind: python
      input: {{rows: "{{{{ count.rows }}}}", n: "{{{{ n }}}}"}}
      code: |
        found = [row["id"] for row in rows]{all}
    next: [forget]
  - step: forget
    tool:
      kind: postgres
      command: "DELETE FROM {table} WHERE execution = :execution"
      params: {{execution: "{{{{ execution_id }}}}"}}
"""

STREAM = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: stream, path: soak/stream}
workload: {n: 200}
workflow:
  - step: read
    tool:
      kind: python
      input: {n: "{{ n }}", execution: "{{ execution_id }}"}
      code: |
        def main(n, execution):
            for first in range(0, n, 10):
                yield [{"execution": str(execution), "id": first + k} for k in range(10)]
    next: [{step: convert, on: call.partial}]
  - step: convert
    loop: {iterator: page}
    tool:
      kind: python
      input: {rows: "{{ page.rows }}"}
      code: "result = [{**row, 'cents': row['id'] * 100} for row in rows]"
    next: [{step: load, on: call.partial}]
  - step: load
    loop: {iterator: page}
    tool: {kind: python, input: {rows: "{{ page.rows }}"}, code: "result = rows"}
    sink: {tool: postgres, table: soak_row}
    next: [count]
""" + _OWN_ROWS.format(table="soak_row", condition="", all=_ALL)

CURSOR = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: cursor, path: soak/cursor}
workload: {n: 50}
workflow:
  - step: fill
    tool:
      kind: postgres
      command: INSERT INTO soak_job (execution, id) SELECT :execution, k FROM generate_series(0, :n - 1) AS k
      params: {execution: "{{ execution_id }}", n: "{{ n }}"}
    next: [work]
  - step: work
    loop:
      cursor:
        kind: postgres
        claim: >
          UPDATE soak_job SET state = 'taken' WHERE ctid IN (
            SELECT ctid FROM soak_job WHERE execution = '{{ execution_id }}' AND state = 'new'
            ORDER BY id LIMIT :__frame_max_rows FOR UPDATE SKIP LOCKED
          ) RETURNING execution, id
        release: UPDATE soak_job SET state = 'new' WHERE execution = :execution AND id = :id
      iterator: job
      spec: {mode: cursor, max_in_flight: 4, frame: {max_rows: 10}}
    tool: {kind: python, input: {id: "{{ job.id }}"}, code: "result = {'id': id, 'square': id * id}"}
    sink:
      tool: postgres
      command: "UPDATE soak_job SET state = 'done', result = :square WHERE execution = :execution AND id = :id"
      args: {execution: "{{ execution_id }}", id: "{{ result.id }}", square: "{{ result.square }}"}
    next: [count]
""" + _OWN_ROWS.format(table="soak_job", condition="AND state = 'done' AND result = id * id", all=_ALL)

TEXTS = {"loop": LOOP, "parallel": PARALLEL, "pool": POOL, "small": SMALL, "stream": STREAM, "cursor": CURSOR}


def write(folder: Path) -> None:
    """Writes the playbooks into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in TEXTS.items():
        (folder / f"{name}.yaml").write_text(text)
