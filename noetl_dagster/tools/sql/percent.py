"""Placeholders as psycopg has them, ``%s`` and ``%(name)s``: rewritten to ``$n`` and ``:name``.

Only what is clearly a placeholder is touched: outside of quotes and comments, with a list for ``%s`` in SQL
that has no ``$n``, with a known name for ``%(name)s``. SQL without any keeps every ``%`` it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from noetl_dagster.tools.sql.statements import Part, scan

_PLACE = re.compile(r"%(?:%|s(?![A-Za-z0-9_])|\(([A-Za-z_][A-Za-z0-9_]*)\)s(?![A-Za-z0-9_]))")
_PLAIN = frozenset({Part.TEXT, Part.END})


def without_percent(texts: Sequence[str], params: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """The texts of one call with the placeholders of this project; ``%s`` are counted through all of them.

    In SQL that has placeholders ``%%`` stands for ``%``, in quotes too, as for psycopg.
    """
    if not params or not any("%" in text for text in texts):
        return list(texts)
    named = isinstance(params, Mapping)
    parts = [list(_parts(text)) for text in texts]
    if not any(_has_place(plain, text, params) for each in parts for plain, text in each):
        return list(texts)
    if not named and any(part is Part.NUMBERED for text in texts for part, _ in scan(text)):
        return list(texts)
    count = 0

    def native(match: re.Match[str]) -> str:
        nonlocal count
        if match[0] == "%%":
            return "%"
        if match[1] is not None:
            return f":{match[1]}" if match[1] in params else match[0]
        if named:
            return match[0]
        count += 1
        return f"${count}"

    return [
        "".join(_PLACE.sub(native, text) if plain else text.replace("%%", "%") for plain, text in each)
        for each in parts
    ]


def _parts(sql: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces: whether it is plain SQL, neither quoted nor comment nor parameter."""
    for plain, group in groupby(scan(sql), key=lambda item: item[0] in _PLAIN):
        yield plain, "".join(text for _, text in group)


def _has_place(plain: bool, text: str, params: Mapping[str, Any] | Sequence[Any]) -> bool:
    if not plain:
        return False
    found = [match for match in _PLACE.finditer(text) if match[0] != "%%"]
    if isinstance(params, Mapping):
        return any(match[1] in params for match in found if match[1] is not None)
    return any(match[1] is None for match in found)
