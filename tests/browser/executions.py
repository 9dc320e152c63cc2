"""Executions for the pages to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import load_playbook
from tests.playbooks import text_of

INVOICES = """
workload: {count: 240, wrong: [17, 136], slow: [40], repaired: ""}
workflow:
  - step: read
    desc: The amount of each invoice
    loop: {in: "{{ range(count) | list }}", iterator: invoice, spec: {mode: parallel, max_in_flight: 16}}
    tool:
      kind: python
      input: {invoice: "{{ invoice }}", wrong: "{{ wrong }}", slow: "{{ slow }}", repaired: "{{ repaired }}"}
      code: |
        import pathlib, time
        if invoice in wrong and not (repaired and pathlib.Path(repaired).exists()):
            raise ValueError(f"invoice {invoice} has no amount")
        time.sleep(0.5 if invoice in slow else 0)
        result = {"invoice": invoice, "amount": invoice * 100}
    next: [total]
  - step: total
    tool: {kind: python, input: {rows: "{{ read.results }}"}, code: "result = sum(row['amount'] for row in rows)"}
"""

GATED = """
workload: {gate: ""}
workflow:
  - step: wait
    tool:
      kind: python
      input: {gate: "{{ gate }}"}
      code: |
        import pathlib, time
        while not pathlib.Path(gate).exists():
            time.sleep(0.02)
        result = "open"
"""

LONG_WORD = "W" * 400
TURNED = "invoice\u202egpj.exe"
MARKUP = (
    "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"
    "<svg onload=\"document.title = 'taken over'\"></svg>\"'><b>bold</b></title></style></script>"
)
HOSTILE = f"{MARKUP} {{{{ 7 * 7 }}}} javascript:alert(1) {TURNED} \x1b[31mred\x07 {LONG_WORD}"
STEP = "a/../<b>step</b> ?&#"


def hostile_text() -> str:
    """A playbook whose names, workload, results and errors are hostile."""
    raw = "{% raw %}" + HOSTILE + "{% endraw %}"
    document = {
        "apiVersion": "noetl.io/v2",
        "kind": "Playbook",
        "metadata": {"name": MARKUP + LONG_WORD, "path": "tests/hostile <b>", "description": HOSTILE},
        "workload": {MARKUP: raw, "text": raw, LONG_WORD: [raw, {MARKUP: raw}]},
        "workflow": [
            {
                "step": STEP,
                "desc": HOSTILE,
                "loop": {"in": "{{ [text, text ~ '!'] }}", "iterator": "item", "mode": "sequential"},
                "tool": {
                    "kind": "python",
                    "input": {"item": "{{ item }}"},
                    "code": "if item.endswith('!'):\n    raise ValueError(item)\nresult = {item: [item]}\n",
                },
            }
        ],
    }
    return json.dumps(document)


async def ran(engine: Engine, folder: Path, name: str, text: str, workload: dict[str, Any] | None = None) -> int:
    """Runs the playbook of a text, which becomes a file of a folder; returns the id of the execution."""
    state = await engine.run(load_playbook(file_of(folder, name, text)), workload)
    assert state.status is not ExecutionStatus.RUNNING
    return state.execution_id


def file_of(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.yaml"
    if not file.exists():
        file.write_text(text if text.startswith("{") else text_of(name, text), encoding="utf-8")
    return file
