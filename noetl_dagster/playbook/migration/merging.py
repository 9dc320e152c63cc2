"""Lines that a rewriting did not mean to change, as they were: what a YAML writer lays out anew is noise."""

from __future__ import annotations

from difflib import SequenceMatcher


def merged(original: list[str], before: list[str], after: list[str], *, by_line: bool = True) -> str:
    """The change from ``before`` to ``after``, made to ``original``.

    Args:
        original: the sections of the text as it stands in the file.
        before: the same, as the writer lays them out.
        after: what the writer lays out once the words are rewritten; it wins where both differ.
        by_line: lines of a section that changes may stay, too. Sections keep this linear in the size of a text.
    """
    if not len(original) == len(before) == len(after):
        return "".join(after)
    sections = zip(original, before, after, strict=True)
    change = _by_line if by_line else _changed
    return "".join(own if old == new else change(own, old, new) for own, old, new in sections)


def _changed(original: str, before: str, after: str) -> str:
    return after


def _by_line(original: str, before: str, after: str) -> str:
    own, old, new = (text.splitlines(keepends=True) for text in (original, before, after))
    result: list[str] = []
    in_own = in_old = in_new = 0
    for start, end, own_start, new_start in _untouched(own, old, new):
        changed = old[in_old:start] != new[in_new:new_start]
        result += new[in_new:new_start] if changed else own[in_own:own_start]
        result += own[own_start : own_start + end - start]
        in_own, in_old, in_new = own_start + end - start, end, new_start + end - start
    return "".join(result)


def _untouched(original: list[str], before: list[str], after: list[str]) -> list[tuple[int, int, int, int]]:
    """Runs of lines that all three have: begin and end in ``before``, begin in ``original`` and in ``after``."""
    own = SequenceMatcher(None, before, original, autojunk=False).get_matching_blocks()
    new = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    found = []
    first = second = 0
    while first < len(own) and second < len(new):
        low = max(own[first].a, new[second].a)
        high = min(own[first].a + own[first].size, new[second].a + new[second].size)
        if low < high:
            found.append((low, high, own[first].b + low - own[first].a, new[second].b + low - new[second].a))
        if own[first].a + own[first].size < new[second].a + new[second].size:
            first += 1
        else:
            second += 1
    return [*found, (len(before), len(before), len(original), len(after))]
