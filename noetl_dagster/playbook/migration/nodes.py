"""Changing the nodes of a YAML text, which carry their comments, quotes and styles with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Pair = tuple[Node, Node]


class Entries:
    """A mapping node by its keys, in the order of the file."""

    def __init__(self, node: MappingNode) -> None:
        self.node = node

    def __contains__(self, key: str) -> bool:
        return self._position(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter([key.value for key, _ in self.node.value if isinstance(key, ScalarNode)])

    def value(self, key: str) -> Node | None:
        position = self._position(key)
        return None if position is None else self.node.value[position][1]

    def text(self, key: str) -> str | None:
        """The value as it is written, where it is a scalar."""
        value = self.value(key)
        return value.value if isinstance(value, ScalarNode) else None

    @property
    def kind(self) -> str | None:
        """``kind``, its own or that of what ``<<`` merges in."""
        merged = self.inner("<<")
        return self.text("kind") or (None if merged is None else merged.kind)

    def inner(self, key: str) -> Entries | None:
        """The mapping below a key, None where there is none."""
        return entries(self.value(key))

    def items(self, key: str) -> list[Node]:
        """The items of the list below a key, none where there is no list."""
        value = self.value(key)
        return value.value if isinstance(value, SequenceNode) else []

    def first(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self), None)

    def rename(self, key: str, name: str) -> None:
        position = self._position(key)
        assert position is not None
        self.node.value[position][0].value = name

    def replace(self, key: str, value: Node) -> None:
        position = self._position(key)
        assert position is not None
        self.node.value[position] = (self.node.value[position][0], value)

    def take(self, key: str) -> Pair:
        """Takes an entry out, with its comments."""
        position = self._position(key)
        assert position is not None
        pair: Pair = self.node.value.pop(position)
        return pair

    def add(self, pair: Pair, position: int | None = None) -> None:
        """Puts an entry in, at the end by default."""
        self.node.value.insert(len(self.node.value) if position is None else position, pair)

    def position(self, key: str) -> int:
        position = self._position(key)
        assert position is not None
        return position

    def _position(self, key: str) -> int | None:
        return next((place for place, (known, _) in enumerate(self.node.value) if known.value == key), None)


def entries(node: Node | None) -> Entries | None:
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
    return SequenceNode(
        "tag:yaml.org,2002:seq", list(items), like.start_mark, like.end_mark, flow_style=bool(flow)
    )


def move_comment(source: Node, target: Node) -> None:
    """Gives the comment of a node that goes to one that stays and has none."""
    comment: Any = getattr(source, "comment", None)
    if comment and not getattr(target, "comment", None):
        target.comment, source.comment = comment, None
