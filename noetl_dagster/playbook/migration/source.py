"""The nodes of a text, each with the characters that it was read from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Collection = MappingNode | SequenceNode

_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_COMMENT_LINE = re.compile(r"\s*#")
_STR = "tag:yaml.org,2002:str"


class UnwritableError(Exception):
    """A part of the text has a form that cannot be rewritten."""


@dataclass(slots=True)
class Part:
    """An entry of a mapping, or an item of a list (``key`` is None then), as it stands in the text.

    Attributes:
        container: the node that it is a part of.
        value: the node at the key or in the list.
        alias: it stands there as ``*name``.
        start: index of the key, or of the dash of an item.
        opened: index behind the key or the dash.
        value_start, value_end: what the value itself takes.
        column: of ``start``, where its container has lines.
        lead: lines of comments above it.
        trailing: blanks and the comment after the value, on its last line.
        tail: blank lines and comments below it that are not the next part's.
        is_inline: the value begins on the line of the key, and no part of it has lines of its own.
        is_explicit: the key is written with ``?``, where the part starts.
    """

    container: Collection
    value: Node
    alias: bool
    start: int
    opened: int
    value_start: int
    value_end: int
    column: int
    key: Node | None = None
    lead: list[str] = field(default_factory=list)
    trailing: str = ""
    tail: list[str] = field(default_factory=list)
    is_inline: bool = True
    is_explicit: bool = False

    @property
    def end(self) -> int:
        """Index of the end of its last line, where its container has lines."""
        return self.value_end + len(self.trailing)


@dataclass(frozen=True, slots=True)
class _Occurrence:
    """A node where it stands: a repeated one stands there as an alias."""

    node: Node
    start: int
    end: int
    alias: bool = False


@dataclass(slots=True)
class Original:
    """A node as it was read: its characters and its parts, or the text of a scalar."""

    start: int
    end: int
    flow: bool
    anchor: str | None
    parts: list[Part] = field(default_factory=list)
    value: str = ""
    style: str | None = None


class Source:
    """A text of YAML and its nodes.

    Attributes:
        root: of the nodes; an alias is the node that it repeats.
        originals: what each node was when it was read, by its id.
        by_key: the entry of each key, by the id of the key's node.
        owners: the part that each node is the value of, by the node's id; of a repeated one the first.

    Raises:
        yaml.YAMLError: the text is not YAML.
        UnwritableError: it has a form that is not understood here.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.originals: dict[int, Original] = {}
        self.by_key: dict[int, Part] = {}
        self.owners: dict[int, Part] = {}
        self._anchors: dict[str, Node] = {}
        events = (event for event in yaml.parse(text, Loader=_FAST) if not isinstance(event, _FRAME))
        self.root = self._node(next(events), events).node

    def original(self, node: Node) -> Original | None:
        """Returns a node as it was read; None if it is new."""
        return self.originals.get(id(node))

    def column(self, index: int) -> int:
        """Returns the column of a character."""
        return index - self.line_start(index)

    def line_start(self, index: int) -> int:
        """Returns the index of the first character of a line."""
        return self.text.rfind("\n", 0, index) + 1

    def line_end(self, index: int) -> int:
        """Returns the index of the end of a line."""
        end = self.text.find("\n", index)
        return len(self.text) if end < 0 else end

    def _node(self, event: Any, events: Iterator[Any]) -> _Occurrence:
        start, end = event.start_mark.index, event.end_mark.index
        marks: tuple[Any, Any] = (event.start_mark, event.end_mark)
        if isinstance(event, yaml.AliasEvent):
            return _Occurrence(self._anchors[str(event.anchor)], start, end, alias=True)
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            node = ScalarNode(event.tag or _STR, event.value, *marks, style=event.style)
            end = start + len(self.text[start:end].rstrip())
            self.originals[id(node)] = Original(start, end, False, event.anchor, value=event.value, style=event.style)
            self._named(event.anchor, node)
            return _Occurrence(node, start, end)
        kind = MappingNode if isinstance(event, yaml.MappingStartEvent) else SequenceNode
        collection = kind(event.tag or "", [], *marks, flow_style=event.flow_style)
        original = self.originals[id(collection)] = Original(start, end, bool(event.flow_style), event.anchor)
        self._named(event.anchor, collection)
        inner: list[_Occurrence] = []
        while not isinstance(following := next(events), yaml.MappingEndEvent | yaml.SequenceEndEvent):
            inner.append(self._node(following, events))
        if isinstance(collection, MappingNode):
            pairs = list(zip(inner[::2], inner[1::2], strict=True))
            collection.value = [(key.node, value.node) for key, value in pairs]
            original.parts = [self._entry(collection, *pair) for pair in pairs]
        else:
            collection.value = [item.node for item in inner]
            original.parts = self._items(collection, inner)
        if original.flow:
            bracket: Any = following
            original.end = bracket.end_mark.index
        else:
            self._lay_out(original)
        return _Occurrence(collection, start, original.end)

    def _named(self, anchor: str | None, node: Node) -> None:
        if anchor is not None:
            self._anchors[anchor] = node

    def _entry(self, container: MappingNode, key: _Occurrence, value: _Occurrence) -> Part:
        opening, is_explicit, column = key.start, False, 0
        start, end = max(value.start, key.end), max(value.end, key.end)
        if not container.flow_style:
            line = self.line_start(key.start)
            before = self.text[line : key.start].rstrip()
            if is_explicit := before.endswith("?"):
                opening = line + len(before) - 1
            if start == end and (colon := _COLON.match(self.text, key.end)):  # nothing stands there
                start = end = colon.end()
            column = opening - line
        given = (container, value.node, value.alias, opening, key.end, start, end, column)
        part = self.by_key[id(key.node)] = Part(*given, key=key.node, is_explicit=is_explicit)
        self.owners.setdefault(id(value.node), part)
        return part

    def _items(self, container: SequenceNode, items: list[_Occurrence]) -> list[Part]:
        """Makes the parts of a list; an item with lines begins at its dash."""
        column, parts = 0, []
        dash = self.originals[id(container)].start
        for index, item in enumerate(items):
            start = opened = item.start
            if not container.flow_style:
                dash = self._dash(dash, column) if index else self.text.index("-", self._behind_properties(dash))
                column = self.column(dash)
                start, opened = dash, dash + 1
            value_start, value_end = max(item.start, opened), max(item.end, opened)
            part = Part(container, item.node, item.alias, start, opened, value_start, value_end, column)
            self.owners.setdefault(id(item.node), part)
            parts.append(part)
            dash = value_end
        return parts

    def _behind_properties(self, index: int) -> int:
        """Returns the index behind an anchor and a tag, and the comments after them."""
        while found := _PROPERTY.match(self.text, index):
            index = found.end()
        return index

    def _dash(self, index: int, column: int) -> int:
        """Returns the index of the next dash at a column, on a line below."""
        while True:
            index = self.line_end(index) + 1
            if index > len(self.text):
                raise UnwritableError("a list is not understood")
            line = self.text[index : self.line_end(index)]
            if line.strip() and not _COMMENT_LINE.match(line):
                found = index + len(line) - len(line.lstrip())
                if self.column(found) != column or self.text[found] != "-":
                    raise UnwritableError(f"a list at {line.strip()[:40]!r} is not understood")
                return found

    def _lay_out(self, original: Original) -> None:
        """Settles which lines belong to which part of a mapping or list with lines."""
        before: Part | None = None
        for part in original.parts:
            inner = None if part.alias else self.original(part.value)
            part.is_inline = inner is None or inner.flow or not inner.parts
            if part.is_inline:
                part.trailing = self.text[part.value_end : self.line_end(part.value_end)]
            if before is not None:
                between = self.text[before.end + 1 : self.line_start(part.start)].split("\n")[:-1]
                kept = len(between)
                while kept and _COMMENT_LINE.match(between[kept - 1]) and _column(between[kept - 1]) == part.column:
                    kept -= 1
                before.tail, part.lead = between[:kept], between[kept:]
            elif not self.text[(line := self.line_start(part.start)) : part.start].strip():
                part.lead = self._above(line)
            before = part
        assert before is not None
        original.end = before.end

    def _above(self, line: int) -> list[str]:
        """Returns the lines between the key of a mapping or list and its first part."""
        lines: list[str] = []
        while line:
            above = self.line_start(line - 1)
            text = self.text[above : line - 1]
            if text.strip() and not _COMMENT_LINE.match(text):
                break
            lines.insert(0, text)
            line = above
        return lines


_FRAME = (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)
_COLON = re.compile(r"[ \t]*:")
_PROPERTY = re.compile(r"[&!]\S*|\s+|#[^\n]*")


def _column(line: str) -> int:
    return len(line) - len(line.lstrip())
