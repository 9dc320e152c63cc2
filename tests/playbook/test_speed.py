"""Loading is linear in the size of a playbook, whatever is wrong with it: calls are counted, not seconds."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from noetl_dagster.playbook.loader import parse_report
from tests.forked import result_of
from tests.playbook.playbooks import HEAD

pytestmark = pytest.mark.long


def chain(steps: int, *, broken: bool) -> str:
    """A playbook of so many steps, each with a template; broken ones lead to nowhere."""
    lines = [HEAD + "workflow:"]
    for number in range(steps):
        target = f"nowhere_{number}" if broken else f"step_{(number + 1) % steps}"
        lines.append(f"  - step: step_{number}")
        lines.append(f'    tool: {{kind: http, url: "{{{{ workload.api }}}}/{{{{ name_{number} }}}}"}}')
        lines.append(f'    next: [{{step: {target}, when: "{{{{ ctx.n_{number} == {number} }}}}"}}]')
    return "\n".join(lines)


def calls(steps: int, broken: bool) -> int:
    """Calls, of Python and of C functions, that loading makes."""
    parse_report(chain(10, broken=broken))  # imports and caches
    text = chain(steps, broken=broken)
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        playbook, problems = parse_report(text)
    finally:
        sys.setprofile(None)
    assert (playbook is None) is broken
    assert len(problems) >= steps
    return count


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "broken"])
def test_loading_is_linear(broken: bool) -> None:
    small, large = result_of(calls, 100, broken), result_of(calls, 400, broken)
    assert large < 4 * small * 1.2
