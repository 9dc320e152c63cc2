"""Reads a step's ``asset``, ``checks`` and ``from``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from noetl_dagster.playbook.assets import (
    AssetSpec,
    CheckKind,
    CheckSpec,
    ReadPartition,
    SourceSpec,
    call_name,
)
from noetl_dagster.playbook.dialects import words
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.document import texts_in
from noetl_dagster.playbook.tool_kinds import LITERAL_FIELDS
from noetl_dagster.playbook.wording import described

_RANGE = 2


def read_asset(block: Block) -> AssetSpec | None:
    """Reads ``asset``; returns None if it only decides whether the step is an asset."""
    if isinstance(block.take("asset"), bool):
        return None
    child = block.child("asset", expected="asset must be false or a mapping with key, owners, ...")
    if child is None:
        return None
    return child.read(
        AssetSpec,
        key=words.asset_key(child, "key"),
        description=words.text(child, "description"),
        group=words.group(child, "group"),
        owners=words.owners(child),
        kinds=words.kinds(child),
        tags=words.tags(child),
        metadata=words.settled(child, "metadata", child.mapping("metadata")),
        code_version=words.text(child, "code_version"),
    )


def read_checks(block: Block) -> tuple[CheckSpec, ...]:
    """Reads ``checks``, a list of mappings or the only one."""
    checks: dict[str, CheckSpec] = {}
    for child in block.blocks("checks", f"{block.what}, check"):
        check = _check(child)
        if check is None:
            continue
        if check.name in checks:
            child.error(f"two checks are called {check.name!r}; rename one", "name")
        checks[check.name] = check
    return tuple(checks.values())


def _check(block: Block) -> CheckSpec | None:
    fields = block.fields(CheckSpec, name=words.name(block, "name"), kind=None, asks=None)
    asked = [kind for kind in CheckKind if block.spelled(kind.value)]
    if len(asked) != 1:
        present = f"found {' and '.join(asked)}" if asked else "found none of them"
        block.error(f"a check asks one thing: {', '.join(CheckKind)}; {present}")
    block.close()
    if len(asked) != 1:
        return None
    [kind] = asked
    asks = _READERS[kind](block, kind.value)
    if asks is None:
        return None
    fields |= {"name": fields["name"] or _default_name(kind, asks), "kind": kind, "asks": asks}
    return block.build(CheckSpec, **fields)


def _default_name(kind: CheckKind, asks: Any) -> str:
    about = list(asks) if isinstance(asks, (list, tuple, dict)) and kind is not CheckKind.ROW_COUNT else []
    return re.sub(r"\W+", "_", "_".join([kind.value, *(str(one) for one in about)]), flags=re.ASCII)


def _template(block: Block, kind: str) -> Any:
    value = block[kind]
    if isinstance(value, (str, bool)):
        return value
    block.error(f'{kind} is a template such as "{{{{ output.row_count > 0 }}}}"', kind)
    return None


def _columns(block: Block, kind: str) -> tuple[str, ...] | None:
    names = block.names(kind)
    if not names:
        block.error(f"{kind} names a column or a list of columns", kind)
    return names or None


def _by_column(wrong: Callable[[Any], str | None]) -> Callable[[Block, str], Any]:
    """Makes a reader of a mapping of columns to values of which ``wrong`` explains nothing."""

    def read(block: Block, kind: str) -> Any:
        asked = block[kind]
        if not isinstance(asked, dict) or not asked:
            found = described(asked or None)
            block.error(f"{kind} is a mapping of column to what it asks, found {found}", kind)
            return None
        for column, reason in ((column, wrong(value)) for column, value in asked.items()):
            if reason is not None:
                block.error(f"{kind}: {column} {reason}", kind)
        return asked

    return read


def _values_wrong(values: Any) -> str | None:
    if isinstance(values, list) and values:
        return None
    return f"needs a list of values, found {described(values or None)}"


def _bounds_wrong(bounds: Any) -> str | None:
    if not isinstance(bounds, list) or len(bounds) != _RANGE or bounds == [None, None]:
        return f"needs [lowest, highest], null where it is open, found {described(bounds)}"
    return f"has its bounds the wrong way round: {described(bounds)}" if _is_empty(bounds) else None


def _row_count(block: Block, kind: str) -> list[int | None] | None:
    """Reads ``1000`` (at least), ``[10, 20]`` or ``{min, max}``."""
    value = block[kind]
    if isinstance(value, dict) and value and value.keys() <= {"min", "max"}:
        value = [value.get("min"), value.get("max")]
    elif isinstance(value, int) and not isinstance(value, bool):
        value = [value, None]
    whole = isinstance(value, list) and all(
        one is None or (isinstance(one, int) and not isinstance(one, bool)) for one in value
    )
    if not whole or len(value) != _RANGE or value == [None, None]:
        block.error(f"{kind} is the lowest number of rows, or {{min: 1, max: 100}}", kind)
        return None
    if _is_empty(value) or any(one is not None and one < 0 for one in value):
        block.error(f"{kind} is no number of rows: {described(block[kind])}", kind)
    return value  # type: ignore[no-any-return]


def _is_empty(bounds: Sequence[Any]) -> bool:
    lowest, highest = bounds
    try:
        return lowest is not None and highest is not None and bool(lowest > highest)
    except TypeError:  # of different kinds, which the check itself says
        return False


def _fresh(block: Block, kind: str) -> dict[str, float] | None:
    child = block.child(kind)
    if child is None or not child.values:
        message = f"{kind} is a mapping of a column to how old its newest value may be, as {{at: 26h}}"
        block.error(message, kind)
        return None
    asks = {column: child.seconds(column) for column in child.values}
    return {column: seconds for column, seconds in asks.items() if seconds is not None} or None


_READERS: dict[CheckKind, Callable[[Block, str], Any]] = {
    CheckKind.WHEN: _template,
    CheckKind.UNIQUE: _columns,
    CheckKind.NOT_NULL: _columns,
    CheckKind.ACCEPTED: _by_column(_values_wrong),
    CheckKind.BETWEEN: _by_column(_bounds_wrong),
    CheckKind.ROW_COUNT: _row_count,
    CheckKind.FRESH: _fresh,
}


def read_sources(block: Block) -> dict[str, SourceSpec]:
    """Reads ``from`` (``{name: {asset, partition}}``, or the asset's key as text) and calls of ``asset("...")``."""
    sources: dict[str, SourceSpec] = {}
    # the fields of the oldest shape, tool: http, stand in the step: 'from' is one
    shared = isinstance(block.values.get("tool"), str)
    for name, entry in ({} if shared else block.mapping("from")).items():
        values = {"asset": entry} if isinstance(entry, (str, list)) else entry
        place = block.document.place(block["from"], name)
        child = block.reading.block(values, f"{block.what}, from {name}", place)
        if child is None:
            continue
        if name in block.reading.workload:
            child.error(f"the workload has a key {name!r} too; call what is read otherwise")
        key = words.asset_key(child, "asset")
        if key is None and "asset" not in child:
            child.error("'asset' is missing, the key of what is read")
        partition = words.text(child, "partition")
        child.close()
        source = None if key is None else child.build(SourceSpec, asset=key, partition=partition, place=place)
        if source is not None:
            sources[name] = source
    for container, field, _, text in texts_in([block.values], 0, LITERAL_FIELDS):
        if "asset(" not in text or "{" not in text:
            continue
        place = block.document.place(container, field)
        for read_call in (call for part in _TEMPLATE.findall(text) for call in _CALL.finditer(part)):
            if read_call["key"] is None:
                message = 'asset() takes a key as it is, as asset("warehouse/patients")'
                block.document.report(place, f"{block.what}: {message}")
                continue
            parts, partition = read_call["key"].strip("/").split("/"), read_call["partition"] or ReadPartition.SAME
            source = SourceSpec(asset=tuple(parts), partition=partition, place=place)
            sources[call_name(read_call["key"], partition)] = source
    return sources


_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_CALL = re.compile(
    r"""(?<![\w.])asset\(\s*(?:(?P<quote>["'])(?P<key>[^"']+)(?P=quote)
        \s*(?:,\s*(?:partition\s*=\s*)?["'](?P<partition>[^"']+)["']\s*)?\))?""",
    re.VERBOSE,
)
