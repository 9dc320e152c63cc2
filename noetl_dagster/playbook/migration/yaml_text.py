"""Edits the nodes of a YAML text and merges the result with the original lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Pair = tuple[Node, Node]


class Entries:
    """A mapping node by its keys, in the order of the file."""

    def __init__(self, node: MappingNode) -> None:
        self.node = node

    def __contains__(self, key: str) -> bool:
        return any(known.value == key for known, _ in self.node.value)

    def __iter__(self) -> Iterator[str]:
        return iter([key.value for key, _ in self.node.value if isinstance(key, ScalarNode)])

    def value(self, key: str) -> Node | None:
        """Returns the node at a key, None if the key is missing."""
        return next((value for known, value in self.node.value if known.value == key), None)

    @property
    def kind(self) -> str | None:
        """``kind``, its own or that of what ``<<`` merges in."""
        value, merged = self.value("kind"), self.inner("<<")
        if isinstance(value, ScalarNode) and value.value:
            return str(value.value)
        return None if merged is None else merged.kind

    def inner(self, key: str) -> Entries | None:
        """The mapping below a key, None where there is none."""
        return entries(self.value(key))

    def items(self, key: str) -> list[Node]:
        """The items of the list below a key, none where there is no list."""
        value = self.value(key)
        return value.value if isinstance(value, SequenceNode) else []

    def position(self, key: str) -> int:
        """Returns the index of a key, which must exist."""
        return next(place for place, (known, _) in enumerate(self.node.value) if known.value == key)

    def rename(self, key: str, name: str) -> None:
        """Renames a key."""
        self.node.value[self.position(key)][0].value = name

    def replace(self, key: str, value: Node) -> None:
        """Replaces the node at a key."""
        position = self.position(key)
        self.node.value[position] = (self.node.value[position][0], value)

    def take(self, key: str) -> Pair:
        """Takes an entry out, with its comments."""
        pair: Pair = self.node.value.pop(self.position(key))
        return pair

    def add(self, pair: Pair, position: int | None = None) -> None:
        """Puts an entry in, at the end by default."""
        self.node.value.insert(len(self.node.value) if position is None else position, pair)


def entries(node: Node | None) -> Entries | None:
    """Returns a mapping node by its keys; None for any other node."""
    return Entries(node) if isinstance(node, MappingNode) else None


def scalar(text: str, like: Node) -> ScalarNode:
    """A plain text, at the place of another node."""
    return ScalarNode("tag:yaml.org,2002:str", text, like.start_mark, like.end_mark)


def mapping(pairs: Iterable[Pair], like: Node, *, flow: bool | None) -> MappingNode:
    """A mapping at the place of another node."""
    return MappingNode(
        "tag:yaml.org,2002:map", list(pairs), like.start_mark, like.end_mark, flow_style=bool(flow)
    )


def sequence(items: Iterable[Node], like: Node, *, flow: bool | None) -> SequenceNode:
    """Makes a list at the place of another node."""
    return SequenceNode(
        "tag:yaml.org,2002:seq", list(items), like.start_mark, like.end_mark, flow_style=bool(flow)
    )


def move_comment(source: Node, target: Node) -> None:
    """Gives the comment of a node that goes to one that stays and has none."""
    comment: Any = getattr(source, "comment", None)
    if comment and not getattr(target, "comment", None):
        target.comment, source.comment = comment, None


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
    return "".join(
        own if old == new else _by_line(own, old, new) if by_line else new
        for own, old, new in zip(original, before, after, strict=True)
    )


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
