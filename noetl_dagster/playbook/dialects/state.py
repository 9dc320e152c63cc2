"""``state`` of a step: how far it has loaded its source, kept from one execution to the next."""

from __future__ import annotations

import re

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.spelling import STATE_KEYS
from noetl_dagster.playbook.models import StateSpec
from noetl_dagster.playbook.wording import described, is_template

_COLUMN = re.compile(r"\w[\w-]*(\.\w[\w-]*)*")
_EXAMPLE = 'state: {key: updated_at, initial: "1970-01-01T00:00:00Z"}'


def read_state(block: Block) -> StateSpec | None:
    """``{key, initial, name}``; None where the step keeps nothing."""
    value = block.take("state")
    if value is None:
        return None
    if not isinstance(value, dict):
        block.error(f"state must be a mapping such as {_EXAMPLE}, found {described(value)}", "state")
        return None
    child = block.child("state")
    assert child is not None
    key, name = child.text("key"), child.text("name")
    initial = child.take("initial")
    child.close(STATE_KEYS)
    for missing in (one for one in ("key", "initial") if one not in child):
        child.error(f"{child.what} needs {missing!r}; write {_EXAMPLE}", kind=ProblemKind.MISSING_FIELD)
    if isinstance(initial, (dict, list, bool)):
        child.error(f"initial is one number or text, or a template, found {described(initial)}", "initial")
    if key is None:
        return None
    if not is_template(key) and _COLUMN.fullmatch(key) is None:
        child.error(
            f"key is {described(key)}; name a column of the result's rows, as updated_at or meta.updated_at, "
            'or write a template over output, as "{{ output.next }}"',
            "key",
        )
    return child.build(StateSpec, key=key, initial=initial, name=name)
