"""Fields of tools, as far as they are literal; what is a template is known when the task runs."""

from __future__ import annotations

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.literal.transfer import check_transfer
from noetl_dagster.playbook.tool_kinds import CHUNK_SIZE, TOOL_KINDS
from noetl_dagster.playbook.wording import described, is_template


def check_task(block: Block, kind: str) -> None:
    """Reports what is wrong with the fields of a task."""
    for names in TOOL_KINDS[kind].fields if kind in TOOL_KINDS else ():
        if names[0] == CHUNK_SIZE[0]:
            _check_size(block, names)
    if kind == "postgres":
        _check_key(block)
    elif kind == "nats":
        _check_subscription(block)
    elif kind == "transfer":
        check_transfer(block)


def _check_size(block: Block, names: tuple[str, ...]) -> None:
    """Rows of a chunk."""
    key = next((name for name in names if block.values.get(name) is not None), None)
    if key is None or (isinstance(block[key], str) and is_template(block[key])):
        return
    try:
        if isinstance(block[key], bool) or int(block[key]) < 0:
            raise ValueError
    except (TypeError, ValueError):
        message = f"{key} must be a number of rows, 1 or more, found {described(block[key])}"
        block.error(f"{message}; leave it out for the usual size", key)


def _check_key(block: Block) -> None:
    key = block.values.get("key")
    if isinstance(key, (list, dict)):
        block.error(
            f"key must be the name of one column, found {described(key)}; name one whose values are unique and never "
            "null, or make one of several in the SQL",
            "key",
        )


def _check_subscription(block: Block) -> None:
    if block.values.get("operation") == "subscribe" and not any(
        block.values.get(name) for name in ("stream", "subject")
    ):
        block.error("subscribe needs 'stream' or 'subject'", "operation", ProblemKind.MISSING_FIELD)
