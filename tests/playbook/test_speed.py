"""Loading is linear in the size of a playbook, whatever is wrong with it."""

from __future__ import annotations

import time

from noetl_dagster.playbook.loader import parse_report
from tests.playbook.playbooks import HEAD


def seconds(steps: int, *, broken: bool = False) -> float:
    """CPU time of this thread for loading a chain of steps: what others do does not count."""
    lines = [HEAD + "workflow:"]
    for number in range(steps):
        target = f"nowhere_{number}" if broken else f"step_{(number + 1) % steps}"
        lines.append(f"  - step: step_{number}")
        lines.append(f'    tool: {{kind: http, url: "{{{{ workload.api }}}}/{{{{ name_{number} }}}}"}}')
        lines.append(f'    next: [{{step: {target}, when: "{{{{ ctx.n_{number} == {number} }}}}"}}]')
    text = "\n".join(lines)
    start = time.thread_time()
    playbook, problems = parse_report(text)
    spent = time.thread_time() - start
    assert (playbook is None) is broken
    assert len(problems) >= steps
    return spent


def test_a_thousand_steps_load_within_two_seconds() -> None:
    assert any(seconds(1000) < 2 for _ in range(3))  # neighbours slow caches down, not three times in a row


def test_loading_is_linear() -> None:
    small = min(seconds(200) for _ in range(3))
    assert any(seconds(1600) < 8 * small * 3 for _ in range(3))


def test_a_thousand_mistakes_are_reported_as_fast() -> None:
    assert any(seconds(1000, broken=True) < 4 for _ in range(3))
