"""What the log keeps of the decisions of policies and of ``retry``."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.rules import rule_places
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.worker.pipeline import REASON_CHARACTERS
from tests.engine.conftest import Run
from tests.playbooks import playbook

FAILS_TWICE = (
    """kind: python, input: {n: "{{ _attempt }}"}, code: "if n < 3: raise ValueError(f'no {n}')\\nresult = n\""""
)
FAILS = """kind: python, code: "raise ValueError('no')\""""
REASON = {"kind": "python", "message": "no"}
RETRY = 'when: "{{ error is defined }}", then: {do: retry, attempts: 3, delay: 0}'
ELSE = "else: {then: {do: continue}}"
ENDS = (EventType.COMMAND_COMPLETED, EventType.COMMAND_FAILED)


def one_step(tasks: str, rest: str = "") -> str:
    return f"""
        workflow:
          - step: start
            tool: {tasks}
            {rest}
        """


def with_rules(tool: str, *rules: str) -> str:
    return f"{{{tool}, spec: {{policy: {{rules: [{', '.join(f'{{{rule}}}' for rule in rules)}]}}}}}}"


async def decisions(engine: Engine, execution_id: int) -> list[list[dict[str, Any]]]:
    """Returns what the ends of commands record of each task's policy, without the places in messages."""
    await engine.runtime.buffer.flush()
    found = [event async for event in engine.runtime.log.events(execution_id) if event.event_type in ENDS]
    recorded = [task["policy"] for event in found for task in event.meta["tasks"] if "policy" in task]
    for entry in (entry for entries in recorded for entry in entries if "error" in entry):
        entry["error"]["message"] = entry["error"]["message"].partition("ValueError: ")[2].partition(" (")[0]
    return recorded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(one_step(f"{{{FAILS}}}"), [], id="no policy"),
        pytest.param(one_step(with_rules("kind: noop", RETRY, ELSE)), [], id="only the default"),
        pytest.param(one_step(with_rules("kind: noop", RETRY)), [], id="no rule matches a success"),
        pytest.param(
            one_step(with_rules(FAILS_TWICE, RETRY, ELSE)),
            [
                [
                    {"rule": 0, "do": "retry", "times": 2, "error": {"kind": "python", "message": "no 2"}},
                    {"rule": "else", "do": "continue", "times": 1},
                ]
            ],
            id="retried until it succeeds",
        ),
        pytest.param(
            one_step(with_rules(FAILS, RETRY)),
            [
                [
                    {"rule": 0, "do": "retry", "times": 2, "error": REASON},
                    {"rule": 0, "do": "fail", "exhausted": True, "times": 1, "error": REASON},
                ]
            ],
            id="no attempt is left",
        ),
        pytest.param(
            one_step(with_rules(FAILS, 'when: "{{ output.data.rows > 1 }}", then: {do: break}')),
            [[{"rule": "default", "do": "continue", "times": 1, "error": REASON}]],
            id="no rule matches a failure",
        ),
        pytest.param(
            one_step(with_rules(FAILS, 'when: "{{ false }}", then: {do: break}', "else: {then: {do: fail}}")),
            [[{"rule": "else", "do": "fail", "times": 1, "error": REASON}]],
            id="the else rule fails",
        ),
        pytest.param(
            one_step(with_rules("kind: noop", "when: \"{{ output.status == 'ok' }}\", then: {do: break}")),
            [[{"rule": 0, "do": "break", "times": 1}]],
            id="a success breaks",
        ),
        pytest.param(
            one_step(f"{{{FAILS}, spec: {{on_error: continue}}}}"),
            [[{"rule": 0, "do": "continue", "times": 1, "error": REASON}]],
            id="on_error",
        ),
        pytest.param(
            one_step(
                """
              - count: {kind: noop, set: {ctx.n: "{{ (ctx.n | default(0)) + 1 }}"},
                        spec: {policy: {rules: [{else: {then: {do: continue}}}]}}}
              - again: {kind: noop, spec: {policy: {rules: [
                  {when: "{{ ctx.n == 2 }}", then: {do: jump, to: count}}, {else: {then: {do: continue}}}]}}}
              - last: {kind: noop, spec: {policy: {rules: [
                  {when: "{{ ctx.n < 5 }}", then: {do: jump, to: count}}]}}}"""
            ),
            [
                [
                    {"rule": "else", "do": "continue", "times": 4},
                    {"rule": 0, "do": "jump", "to": "count", "times": 1},
                ],
                [
                    {"rule": 0, "do": "jump", "to": "count", "times": 3},
                    {"rule": "default", "do": "continue", "times": 1},
                ],
            ],
            id="jumps, also after plain decisions",
        ),
        pytest.param(
            one_step(
                with_rules(FAILS_TWICE.replace("{{ _attempt }}", "{{ item }}"), RETRY.replace("retry", "continue")),
                "loop: {in: [2, 3], iterator: item}",
            ),
            [[{"rule": 0, "do": "continue", "times": 1, "error": {"kind": "python", "message": "no 2"}}]],
            id="one of two iterations",
        ),
    ],
)
async def test_decisions_are_recorded(run: Run, engine: Engine, text: str, expected: list[Any]) -> None:
    state = await run(text)
    assert await decisions(engine, state.execution_id) == expected


async def test_undefined_names_of_rules_are_recorded(run: Run, engine: Engine) -> None:
    state = await run(
        one_step(with_rules("kind: noop, result: {ready: 1}", 'when: "{{ output.redy }}", then: {do: fail}', ELSE))
    )
    await engine.runtime.buffer.flush()
    [end] = [event async for event in engine.runtime.log.events(state.execution_id) if event.event_type in ENDS]
    [reason] = end.meta["tasks"][0]["undefined"]
    assert "'redy' is undefined: the result has the keys ready; did you mean 'ready'?" in reason


async def test_reasons_are_short_and_have_no_secret(run: Run, engine: Engine) -> None:
    secret = "nightingale-4711"
    SECRETS.hide(secret)
    tool = f"kind: python, code: \"raise ValueError('{secret} ' + 'x' * 500)\""
    state = await run(one_step(with_rules(tool, "else: {then: {do: continue}}")))
    await engine.runtime.buffer.flush()
    [end] = [event async for event in engine.runtime.log.events(state.execution_id) if event.event_type in ENDS]
    message = end.meta["tasks"][0]["policy"][0]["error"]["message"]
    assert "***" in message
    assert len(message) == REASON_CHARACTERS


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("tool: {%s}\n    retry: [{when: \"{{ error.kind == 'http' }}\", then: {max_attempts: 2}},"
         ' {when: "{{ error is defined }}", then: {max_attempts: 3, delay: 0}}]',
         [None, {"task": "task_0", "rule": 1}, {"task": "task_0", "rule": 1}]),
        ("tool: {%s}\n    loop: {in: [1], iterator: item}"
         "\n    spec: {loop_mode: fanout, fanout: {max_shard_retries: 1}}",
         [None, {"rule": "max_shard_retries"}]),
    ],
)  # fmt: skip
async def test_the_next_attempt_names_what_asked_for_it(run: Run, engine: Engine, step: str, expected: Any) -> None:
    state = await run(f"workflow:\n  - step: start\n    {step % FAILS}")
    await engine.runtime.buffer.flush()
    events = [event async for event in engine.runtime.log.events(state.execution_id)]
    issued = [event for event in events if event.event_type == EventType.COMMAND_ISSUED]
    assert [event.meta.get("retry") for event in issued] == expected


RULES = """
workbook:
  - name: shared
    tool:
      kind: noop
      spec:
        policy:
          - when: "{{ output.n > 1 }}"
            then: {do: break}
workflow:
  - step: start
    tool:
      - fetch:
          kind: noop
          spec:
            policy:
              rules:
                - else: {then: {do: fail}}
                - name: busy
                  when: "{{ error.status == 503 }}"
                  then: {do: retry}
      - ask: {kind: workbook, name: shared}
    next: [end]
  - step: end
    spec: {on_error: continue}
    tool: {kind: noop}
"""


def test_rules_have_places() -> None:
    read = playbook(RULES)
    lines = read.source.splitlines()
    shown = {rule: (lines[(place.line or 0) - 1].strip(), place.when) for rule, place in rule_places(read).items()}
    assert shown == {
        ("start", "fetch", 0): ('when: "{{ error.status == 503 }}"', "{{ error.status == 503 }}"),
        ("start", "fetch", "else"): ("- else: {then: {do: fail}}", None),
        ("start", "ask", 0): ('- when: "{{ output.n > 1 }}"', "{{ output.n > 1 }}"),
        ("end", "task_0", 0): ("spec: {on_error: continue}", "{{ error is defined }}"),
    }
    assert rule_places(Playbook.from_stored(read.stored or "", read.source, file=read.file, renamed={})) == rule_places(
        read
    )
