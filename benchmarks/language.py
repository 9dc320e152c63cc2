"""Speed of the playbook language: loading and rendering. Prints plain numbers.

python benchmarks/language.py
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Callable

from jinja2.nativetypes import NativeEnvironment
from jinja2.sandbox import SandboxedEnvironment

from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView

SIZES = (250, 1000, 2500)
TEMPLATES = (
    "{{ user.id }}",
    "{{ fetch.data.paging.page }}",
    "{{ output.status == 'ok' and (user.id | int) > 2 }}",
    "SELECT * FROM users WHERE id = {{ user.id }} AND page = {{ fetch.data.paging.page }}",
)
_STEP = """
  - step: step_{number}
    desc: one of many
    input: {{value: "{{{{ workload.items[{number}] | default({number}) }}}}"}}
    tool:
      - name: fetch
        kind: http
        url: "{{{{ workload.api }}}}/items/{number}"
        params: {{page: "{{{{ ctx.page_{number} | default(1) }}}}"}}
        spec:
          policy:
            rules:
              - when: "{{{{ output.status == 'error' and output.http.status == 42{digit} }}}}"
                then: {{do: retry, attempts: 5, backoff: exponential, delay: 2}}
              - else: {{then: {{do: continue, set: {{ctx.page_{number}: "{{{{ output.data.page }}}}"}}}}}}
      - name: note
        kind: python
        input: {{rows: "{{{{ fetch.data }}}}"}}
        code: |
          result = {{"rows": len(rows)}}
"""


def playbook_text(steps: int) -> str:
    """A chain of ``steps`` steps, each with two tasks, a policy and templates of its own."""
    head = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: big, path: bench/big}\n"
    head += "workload: {api: 'http://localhost', items: []}\nworkflow:"
    body = []
    for number in range(steps):
        body.append(_STEP.format(number=number, digit=number % 10))
        if number < steps - 1:
            body.append(f'    next: {{arcs: [{{step: step_{number + 1}, when: "{{{{ ctx.page_{number} }}}}"}}]}}')
    return head + "".join(body)


def load_seconds(steps: int) -> float:
    """CPU seconds, so that a busy machine does not count."""
    text = playbook_text(steps)
    start = time.process_time()
    parse_playbook(text)
    return time.process_time() - start


def microseconds(call: Callable[[], object], number: int = 20_000) -> float:
    return min(timeit.repeat(call, timer=time.process_time, number=number, repeat=3)) / number * 1e6


def sample_scope() -> Scope:
    envelope = {"status": "ok", "data": {"status_code": 200, "data": {"paging": {"page": 1}}}}
    steps = {"fetch": ResultView(envelope, ReferenceCache())}
    scope = Scope(execution_id=1, workload={"items": list(range(100))}, ctx={"page": 1}, steps=steps)
    return scope.with_iteration("user", {"id": 3}, 0, 10).with_locals({"output": steps["fetch"]})


def main() -> int:
    seconds = {steps: load_seconds(steps) for steps in SIZES}
    for steps, spent in seconds.items():
        print(f"load {steps} steps: {spent:.3f} s of CPU, {spent / steps * 1e6:.0f} us a step")
    growth = (seconds[SIZES[-1]] / SIZES[-1]) / (seconds[SIZES[0]] / SIZES[0])
    print(f"growth of the time a step from {SIZES[0]} to {SIZES[-1]} steps: {growth:.2f} (1 is linear)")

    scope = sample_scope()
    plain_scope = {"user": {"id": 3}, "output": {"status": "ok"}, "fetch": {"data": {"paging": {"page": 1}}}}
    raw, native = SandboxedEnvironment(), NativeEnvironment()
    for source in TEMPLATES:
        ours = compile_value(source)
        if source.startswith("{{"):
            expression = raw.compile_expression(source[2:-2], undefined_to_none=False)
            peer = microseconds(lambda expression=expression: expression(plain_scope))  # type: ignore[misc]
            peer_name = "jinja compile_expression"
        else:
            template = native.from_string(source)
            peer = microseconds(lambda template=template: template.render(plain_scope))  # type: ignore[misc]
            peer_name = "jinja native render"
        spent = microseconds(lambda ours=ours: ours.render(scope))  # type: ignore[misc]
        print(f"render {source!r}: {spent:.2f} us; {peer_name} {peer:.2f} us; ratio {spent / peer:.2f}")
    again = microseconds(lambda: compile_value(TEMPLATES[-1]))
    print(f"compile a known template again: {again:.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
