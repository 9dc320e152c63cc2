"""Writes rewritten nodes into the text that they were read from: what did not change stays as it is, byte for byte."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from noetl_dagster.playbook.migration.source import Part, Source, UnwritableError

_INDENT = 2
_UNSAFE_IN_FLOW = re.compile(r"[,\[\]{}]")
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)+")
_COMMENT = re.compile(r"\s+#.*")
_BLOCK_STYLES = ("|", ">")


def written(source: Source) -> str:
    """Returns the text of a source whose nodes have been rewritten.

    Raises:
        UnwritableError: a part that changes has a form that is not understood here.
    """
    return _Writer(source).text()


class _Writer:
    """Writes nodes. Lines of a mapping or list are whole lines; what is inside of brackets is a piece of a line."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._text = source.text
        self._changed: dict[int, bool] = {}
        self._alive: set[int] = set()
        self._once: set[int] = set()
        root = source.original(source.root)
        self._quote = '"' if root is not None and root.flow else ""  # the text may be JSON
        self._step = self._usual_step(MappingNode) or _INDENT
        self._list_step = self._usual_step(SequenceNode)
        self._mark(source.root)
        for original in source.originals.values():
            for part in original.parts:
                self._hand_down(part)

    def text(self) -> str:
        """Returns the whole text."""
        source, root = self._source, self._source.root
        original = source.original(root)
        if original is None or not self._is_changed(root):
            return self._text
        if original.flow:
            return self._text[: original.start] + self._flow(root) + self._text[original.end :]
        first = original.parts[0]
        head = self._text[: source.line_start(first.start)].split("\n")[:-1]
        lines = [*head[: len(head) - len(first.lead)], *self._block(root, source.column(first.start))]
        return "\n".join(lines) + self._text[original.end :]

    # -- what changed

    def _mark(self, node: Node) -> None:
        """Notes the nodes that there still are."""
        if id(node) in self._alive:
            return
        self._alive.add(id(node))
        for child in _children(node):
            self._mark(child)

    def _is_changed(self, node: Node) -> bool:
        """Reports whether a node, or one in it, differs from the text. Inside, an alias is what it is."""
        known = self._changed.get(id(node))
        if known is None:
            self._changed[id(node)] = False  # an alias inside itself
            known = self._changed[id(node)] = self._differs(node)
        return known

    def _differs(self, node: Node) -> bool:
        original = self._source.original(node)
        if original is None:
            return True
        if isinstance(node, ScalarNode):
            return bool(node.value != original.value)
        if _is_flow(node) != original.flow or len(node.value) != len(original.parts):
            return True
        return any(
            (key is not part.key)
            or (key is not None and self._is_changed(key))
            or value is not part.value
            or (not part.alias and self._is_changed(value))
            for (key, value), part in zip(_pairs(node), original.parts, strict=True)
        )

    def _hand_down(self, part: Part) -> None:
        """Gives the comments of an entry that is gone to the entries that were in it."""
        key, original = part.key, self._source.original(part.value)
        if key is None or id(key) in self._alive or id(part.value) in self._alive or original is None:
            return
        if original.parts and not part.alias:
            first, last = original.parts[0], original.parts[-1]
            comment = part.trailing if part.is_inline else self._behind_key(part)[1]
            above = [*part.lead, comment] if comment.strip() else part.lead
            first.lead = [*_at(above, first.column), *first.lead]
            last.tail = [*last.tail, *part.tail]

    # -- lines

    def _block(self, node: Node, column: int) -> list[str]:
        """Returns the lines of a mapping or list."""
        self._once.add(id(node))
        lines: list[str] = []
        for key, value in _pairs(node):
            lines += self._part(self._part_of(node, key, value), key, value, column)
        return lines

    def _part_of(self, node: Node, key: Node | None, value: Node) -> Part | None:
        """Returns the part of the text that an entry or item was; of a new item the one that it was inside of."""
        if key is not None:
            return self._source.by_key.get(id(key))
        inside: Part | None = self._source.owners.get(id(value))
        while inside is not None and inside.container is not node:
            inside = self._source.owners.get(id(inside.container))
        if inside is None or id(inside) in self._once:
            return None
        self._once.add(id(inside))
        return inside

    def _part(self, part: Part | None, key: Node | None, value: Node, column: int) -> list[str]:
        """Returns the lines of an entry or item, comments around it included."""
        delta = 0 if part is None or part.container.flow_style else column - part.column
        if part is not None and not self._part_changed(part, key, value):
            lines = self._text[part.start : part.end].split("\n")
            return [*_moved(part.lead, delta), " " * column + lines[0], *_moved(lines[1:], delta), *part.tail]
        lead, tail, comment = [], [], ""
        if part is not None and part.is_explicit:
            raise UnwritableError(f"the key {self._text[part.start : part.opened]!r} is written with '?'")
        if part is not None:
            lead = _at(part.lead, column) if part.container.flow_style else _moved(part.lead, delta)
            tail, comment = part.tail, part.trailing if part.is_inline else self._behind_key(part)[1]
        gone, label = self._gone(part, self._source.owners.get(id(value))), self._source.by_key.get(id(value))
        found = ""
        if gone is not None:  # its comments stay with its value
            lead, tail, found = [*lead, *_at(gone.lead, column)], [*gone.tail, *tail], gone.trailing
        if (named := self._gone(part, label)) is not None:
            found = self._behind_key(named)[1] or found
        if comment.strip() and found.strip():
            lead = [*lead, *_at([comment], column)]
        comment = found if found.strip() else comment
        if self._alias(part, value) is None and self._has_lines(value):
            body = self._with_lines(part, key, value, column, comment)
        else:
            body = self._on_one_line(part, key, value, column, comment)
        return [*lead, *body, *tail]

    def _part_changed(self, part: Part, key: Node | None, value: Node) -> bool:
        if part.container.flow_style or part.value is not value:
            return True
        return (key is not None and self._is_changed(key)) or (not part.alias and self._is_changed(value))

    def _gone(self, part: Part | None, owner: Part | None) -> Part | None:
        """Returns the entry with lines that a value or label was at, if that entry is gone."""
        if owner is None or owner is part or owner.key is None or owner.container.flow_style:
            return None
        is_kept = id(owner.container) in self._alive and any(owner.key is key for key, _ in _pairs(owner.container))
        return None if is_kept else owner

    def _with_lines(self, part: Part | None, key: Node | None, value: Node, column: int, comment: str) -> list[str]:
        """Returns the lines of a part whose value has lines of its own."""
        text, known = self._text, part if part is not None and part.value is value and not part.is_inline else None
        name, inner = "-" if key is None else self._scalar(key), self._inner_column(part, key, value, column)
        if known is not None and self._source.line_end(known.opened) < self._first(value).start:
            line = f"{' ' * column}{name}{self._behind_key(known)[0]}"
            return [self._commented(line, comment, part), *self._block(value, inner)]
        if key is not None:
            anchor = self._properties(value)
            line = f"{' ' * column}{name}:{' ' if anchor else ''}{anchor}"
            return [self._commented(line, comment, part), *self._block(value, inner)]
        gap = " " if known is None else text[known.opened : self._first(value).start]
        lines = self._block(value, column + 1 + len(gap))
        first = next(place for place, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#"))
        lines[first] = f"{' ' * column}-{gap}{lines[first].lstrip()}"
        above = [comment, *lines[:first]] if comment.strip() else lines[:first]
        return [*_at(above, column), *lines[first:]]

    def _first(self, value: Node) -> Part:
        """Returns the first part of a mapping or list that the text has."""
        original = self._source.original(value)
        assert original is not None
        return original.parts[0]

    def _inner_column(self, part: Part | None, key: Node | None, value: Node, column: int) -> int:
        """Returns the column of a value's lines: as far from its key as they were, or as what was there before."""
        known = self._source.owners.get(id(value)) if part is None or part.container.flow_style else part
        if known is not None and not known.is_inline and not known.container.flow_style:
            found = column + self._first(known.value).column - known.column
            if found >= column + (0 if isinstance(value, SequenceNode) else 1):
                return found
        return column + (self._list_step if isinstance(value, SequenceNode) else self._step)

    def _properties(self, node: Node) -> str:
        """Returns the anchor and tag of a mapping or list with lines."""
        original = self._source.original(node)
        if original is None or original.flow:
            return ""
        found = _PROPERTIES.match(self._text, original.start, original.parts[0].start)
        return " ".join(found[0].split()) if found else ""

    def _behind_key(self, part: Part) -> tuple[str, str]:
        """Returns what is on the line of a key or dash with lines below it: colon and anchor, and the comment."""
        end = self._source.line_end(part.opened)
        if part.is_inline or self._first(part.value).start < end:
            return "", ""
        rest = self._text[part.opened : end]
        found = _COMMENT.search(rest)
        return (rest, "") if found is None else (rest[: found.start()], found[0])

    def _on_one_line(self, part: Part | None, key: Node | None, value: Node, column: int, comment: str) -> list[str]:
        """Returns the lines of a part whose value begins on the line of its key; it may go on below."""
        name, between = ("-", " ") if key is None else (self._scalar(key), ": ")
        if part is not None and part.is_inline:
            there = self._text[part.opened : part.value_start]
            between = there if ":" in there or key is None else between
        delta = 0 if part is None or part.container.flow_style else column - part.column
        piece = self._alias(part, value) or self._flow(value)
        lines = f"{name}{between}{piece}".split("\n")
        lines = [" " * column + lines[0], *_moved(lines[1:], delta)]
        lines[-1] = self._commented(lines[-1], comment, part)
        return lines

    def _commented(self, line: str, trailing: str, part: Part | None) -> str:
        """Adds a comment, in the column in which it was if there is room."""
        comment = trailing.strip()
        if not comment:
            return line + trailing
        at = len(line) + len(trailing) - len(trailing.lstrip())
        if part is not None and (found := self._text.find(trailing, part.opened)) >= 0:
            at = self._source.column(found + len(trailing) - len(trailing.lstrip()))
        return line + " " * max(at - len(line), 1) + comment

    # -- pieces of lines

    def _has_lines(self, node: Node) -> bool:
        """Reports whether a node is written with lines of its own."""
        original = self._source.original(node)
        if isinstance(node, ScalarNode) or (original is not None and original.flow and not self._is_changed(node)):
            return False
        return not _is_flow(node) or not all(map(self._fits, _pairs(node)))

    def _fits(self, pair: tuple[Node | None, Node]) -> bool:
        """Reports whether an entry or item can stand inside of brackets."""
        key, value = pair
        part = None if key is None else self._source.by_key.get(id(key))
        if part is not None and part.lead:
            return False
        if part is not None and not part.container.flow_style:
            if part.trailing.strip():
                return False
            original = self._source.original(value)
            if isinstance(value, ScalarNode) and original is not None:
                piece = self._text[original.start : original.end]
                if original.style in _BLOCK_STYLES or "\n" in piece:
                    return False
                if not original.style and _UNSAFE_IN_FLOW.search(piece):
                    return False
        return not self._has_lines(value)

    def _alias(self, part: Part | None, value: Node) -> str | None:
        """Returns ``*name`` for a node that stands elsewhere in the text."""
        if part is not None and part.alias and part.value is value:
            return self._text[part.value_start : part.value_end]
        original = self._source.original(value)
        if original is not None and original.anchor is not None and id(value) in self._once:
            return f"*{original.anchor}"
        return None

    def _flow(self, node: Node) -> str:
        """Returns a scalar, or a mapping or list in brackets."""
        original = self._source.original(node)
        self._once.add(id(node))
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if original is not None and original.flow and not self._is_changed(node):
            return self._text[original.start : original.end]
        opening, closing = ("{", "}") if isinstance(node, MappingNode) else ("[", "]")
        separators: dict[int, str] = {}
        if original is not None and original.flow and original.parts:
            parts = original.parts
            opening = self._text[original.start : parts[0].start]
            closing = self._text[parts[-1].value_end : original.end]
            for before, part in pairwise(parts):
                separators[id(part.key or part.value)] = self._text[before.value_end : part.start]
        pieces: list[str] = []
        for key, value in _pairs(node):
            separator = separators.get(id(key if key is not None else value), ", ") if pieces else ""
            pieces.append(separator + self._flow_part(key, value))
        return opening + "".join(pieces) + closing

    def _flow_part(self, key: Node | None, value: Node) -> str:
        part = None if key is None else self._source.by_key.get(id(key))
        piece = self._alias(part, value) or self._flow(value)
        if key is None:
            return piece
        between = ": "
        if part is not None and part.is_inline:
            between = self._text[part.opened : part.value_start]
        return f"{self._scalar(key)}{between}{piece}"

    def _scalar(self, node: Node) -> str:
        """Returns a scalar as the text has it; a new word in the quotes of the old one."""
        original = self._source.original(node)
        if original is None:
            return f"{self._quote}{node.value}{self._quote}"
        piece = self._text[original.start : original.end]
        if node.value == original.value:
            return piece
        quote = original.style if original.style in ("'", '"') else ""
        return f"{quote}{node.value}{quote}"

    # -- layout of new lines

    def _usual_step(self, kind: type[Node]) -> int:
        """Returns how far the text mostly indents mappings or lists below their keys."""
        owners = (part for part in self._source.owners.values() if part.key is not None and not part.is_inline)
        steps = (self._first(part.value).column - part.column for part in owners if isinstance(part.value, kind))
        return next((step for step, _ in Counter(steps).most_common(1)), 0)


def _pairs(node: Node) -> list[tuple[Node | None, Node]]:
    if isinstance(node, MappingNode):
        return list(node.value)
    return [(None, item) for item in node.value]


def _is_flow(node: Node) -> bool:
    return isinstance(node, MappingNode | SequenceNode) and bool(node.flow_style)


def _children(node: Node) -> list[Node]:
    if isinstance(node, ScalarNode):
        return []
    return [child for pair in _pairs(node) for child in pair if child is not None]


def _at(lines: Iterable[str], column: int) -> list[str]:
    """Returns comments as lines that begin at a column."""
    return [" " * column + line.strip() if line.strip() else line for line in lines]


def _moved(lines: Sequence[str], delta: int) -> list[str]:
    """Moves lines to the right, or as far as possible to the left."""
    if delta == 0:
        return list(lines)
    if delta > 0:
        return [" " * delta + line if line else line for line in lines]
    return [line[min(-delta, len(line) - len(line.lstrip(" "))) :] for line in lines]
