"""YAML text as plain values that remember where they stand.

The values are ordinary dicts, lists and scalars; places live beside them, found by container and key.
Three things differ from ``yaml.safe_load``: mapping keys are always text as written (``on`` stays ``on``
instead of turning into True), dates stay text, and a key that occurs twice is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import isfinite
from typing import Any

import yaml
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.nodes import Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError

from noetl_dagster.errors import Place, Problem, ProblemKind
from noetl_dagster.settings import get_settings

# PyYAML rather than ruamel.yaml: the nodes of 1,000 steps (760 KB) take libyaml 0.6 s of CPU, ruamel's round trip
# 4.5 s, its C loader 0.75 s; and YAML 1.2 would change what playbooks say (yes, on, 017, 1:30).
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT_TAGS = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"})
_COLLECTION_TAGS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
_MERGE_TAG = "tag:yaml.org,2002:merge"
NOT_UNDERSTOOD = frozenset({ProblemKind.UNKNOWN_FIELD, ProblemKind.UNSUPPORTED_KIND})
"""Problems of keys and tool kinds that other engines may know."""

MOST_LEVELS = 100
"""Maximum nesting depth of a playbook; Python's own limit of recursion is ten times as far away."""

MOST_VALUES = 200_000
"""Maximum number of values in a playbook; aliases count with everything that they repeat."""

_TOO_DEEP = f"nested deeper than {MOST_LEVELS} levels, or an alias inside itself; flatten it"
_TOO_MANY = (
    f"more than {MOST_VALUES:,} values up to here, each alias counted with all that it repeats; read large data from a "
    "file or table"
)
_TOO_LONG = "{} more than {:,} bytes; read large data from a file or table (limit: NOETL_PLAYBOOK_BYTES)"
_LONGEST_NUMBER = 400
"""Characters of a number, date or other scalar that is not text. Converting long ones takes quadratic time."""


class _LimitError(yaml.MarkedYAMLError):
    """The text exceeds a limit of the installation."""

    def __init__(self, mark: Any, problem: str) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _CountingLoader(_Loader):  # type: ignore[misc]
    """Counts depth and values while the text is parsed.

    libyaml's composer calls itself for each level, so deep nesting overflows the stack of the process. It calls
    :meth:`descend_resolver` before each value and :meth:`ascend_resolver` after it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0

    def descend_resolver(self, parent: Any, index: Any) -> None:
        """Counts a value; raises if it exceeds a limit."""
        self._depth += 1
        self._values += 1
        if self._depth > MOST_LEVELS:
            raise _LimitError(parent.start_mark, _TOO_DEEP)
        if self._values > MOST_VALUES:
            last = parent.value[-1] if parent.value else parent
            raise _LimitError((last[0] if isinstance(last, tuple) else last).start_mark, _TOO_MANY)

    def ascend_resolver(self) -> None:
        """Leaves a value."""
        self._depth -= 1


class Document:
    """One YAML document: ``root`` is its value, ``problems`` what is wrong with the YAML itself."""

    def __init__(self, text: str, file: str, *, lenient: bool = False) -> None:
        self.file = file
        self.lenient = lenient
        self.problems: list[Problem] = []
        self.root: Any = None
        self._key_marks: dict[int, dict[str, Any]] = {}
        self._value_marks: dict[int, dict[Any, Any]] = {}
        self._kept: dict[int, Any] = {}
        self._commands: set[int] = set()
        self._constructor = SafeConstructor()
        self._most_characters = get_settings().playbook_bytes
        self._values = self._characters = 0
        self._made: set[int] = set()  # nodes, which aliases repeat
        try:
            if len(text) > self._most_characters:
                raise _LimitError(None, _TOO_LONG.format("the text has", self._most_characters))
            node = yaml.compose(text, Loader=_CountingLoader)
            self.start = self._at(None if node is None else node.start_mark)
            if node is not None:
                self.root = self._value(node, 1)
        except _LimitError as error:
            self.problems.append(Problem(self._at(error.problem_mark), str(error.problem)))
        except ReaderError as error:  # its position counts bytes
            self._refuse_character(text.encode(), error.position, error.character)
        except UnicodeEncodeError as error:
            before = text[: error.start].encode()
            self._refuse_character(before, len(before), text[error.start])
        except yaml.YAMLError as error:
            self.problems.append(self._syntax_problem(error))

    def place(self, container: Any, key: Any = None) -> Place:
        """Returns the place of ``container[key]``, or of the container."""
        mark = self._value_marks.get(id(container), {}).get(key)
        return self._at(mark or self._kept.get(id(container), (None, None))[1])

    def key_place(self, container: Any, key: str) -> Place:
        """Returns the place of the key itself."""
        mark = self._key_marks.get(id(container), {}).get(key)
        return self.place(container) if mark is None else self._at(mark)

    def _at(self, mark: Any) -> Place:
        return Place(self.file, 1, 1) if mark is None else Place(self.file, mark.line + 1, mark.column + 1)

    def gathered(self, parts: Iterable[tuple[dict[str, Any], str, str]]) -> dict[str, Any]:
        """Makes a mapping of values (mapping, key in it, new key), each of which still knows where it stands."""
        parts = tuple(parts)
        values = {name: container[key] for container, key, name in parts}
        for marks in (self._key_marks, self._value_marks):
            entries = ((name, marks.get(id(container), {}).get(key)) for container, key, name in parts)
            marks[id(values)] = {name: mark for name, mark in entries if mark is not None}
        self._kept[id(values)] = (values, None)
        return values

    def add_commands(self, value: Any) -> None:
        """Notes that a value of the document, a text or the texts in it, belongs to a command."""
        self._commands.update(id(text) for *_, text in texts_in([value], 0))

    def is_command(self, text: str) -> bool:
        """Reports whether this object, a text of the document, belongs to a command."""
        return id(text) in self._commands

    def report(
        self,
        place: Place,
        message: str,
        severity: str = "error",
        kind: ProblemKind = ProblemKind.INVALID_VALUE,
    ) -> None:
        """Adds a problem. Anything that is not understood is a warning when reading leniently."""
        if self.lenient and kind in NOT_UNDERSTOOD:
            severity = "warning"
        self.problems.append(Problem(place, message, severity, kind))

    def _value(self, node: Node, depth: int, repeated: Any = None) -> Any:
        """Returns the value of a node. What an alias repeats is made again, and counts again.

        Args:
            repeated: the mark around the outermost alias that leads here.
        """
        self._values += 1
        if isinstance(node, ScalarNode):
            self._characters += len(node.value)
            return self._scalar(node)
        if depth > MOST_LEVELS:  # an alias inside itself
            raise _LimitError(repeated or node.start_mark, _TOO_DEEP)
        self._made.add(id(node))
        if node.tag not in _COLLECTION_TAGS:
            self.report(self._at(node.start_mark), f"the tag {node.tag[:80]!r} is unknown; remove it")
        if isinstance(node, SequenceNode):
            value: Any = [self._value(item, depth + 1, repeated or self._mark_of(node, item)) for item in node.value]
            self._value_marks[id(value)] = dict(enumerate(item.start_mark for item in node.value))
        else:
            value = self._mapping(node, depth, repeated)
        self._check_size(repeated or node.start_mark)
        self._kept[id(value)] = (value, node.start_mark)
        return value

    def _mark_of(self, node: Node, item: Node) -> Any:
        """Returns the mark of a collection if an item of it is an alias."""
        return node.start_mark if id(item) in self._made else None

    def _check_size(self, mark: Any) -> None:
        if self._values > MOST_VALUES:
            raise _LimitError(mark, _TOO_MANY)
        if self._characters > self._most_characters:
            texts = "the texts up to here, each alias counted with all that it repeats, have"
            raise _LimitError(mark, _TOO_LONG.format(texts, self._most_characters))

    def _scalar(self, node: ScalarNode) -> Any:
        if node.tag in _TEXT_TAGS:
            return node.value
        try:
            if len(node.value) > _LONGEST_NUMBER:
                raise ValueError(f"more than {_LONGEST_NUMBER} characters")
            value = self._constructor.construct_object(node)
            if isinstance(value, bytes):
                raise ValueError("the tag !!binary is not supported")
            if isinstance(value, int | float) and not _is_exact(value, node.value):
                raise ValueError("neither a 64-bit integer nor a double holds it")
            return value
        except (ConstructorError, ValueError, LookupError, OverflowError) as error:
            reason = getattr(error, "problem", None) or str(error)
            message = f"value {node.value[:80]!r}: {reason}; quote it if text is meant"
            self.report(self._at(node.start_mark), message)
            return node.value

    def _mapping(self, node: Node, depth: int, repeated: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        key_marks: dict[str, Any] = {}
        value_marks: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                self._merge(value_node, values, depth, repeated or self._mark_of(node, value_node))
                continue
            if not isinstance(key_node, ScalarNode):
                message = 'a mapping stands where text is expected; a template must be quoted: "{{ name }}"'
                self.report(self._at(node.start_mark), message)
                continue
            key = key_node.value
            if key in key_marks:
                first = key_marks[key].line + 1
                message = f"key {key!r} occurs twice (first on line {first}); keep one"
                self.report(self._at(key_node.start_mark), message, kind=ProblemKind.DUPLICATE_KEY)
                continue
            self._characters += len(key)
            key_marks[key] = key_node.start_mark
            value_marks[key] = value_node.start_mark
            values[key] = self._value(value_node, depth + 1, repeated or self._mark_of(node, value_node))
        self._key_marks[id(values)] = key_marks
        self._value_marks[id(values)] = value_marks
        return values

    def _merge(self, node: Node, values: dict[str, Any], depth: int, repeated: Any) -> None:
        """Merges ``<<: *anchor``: adds the keys that the mapping does not set itself."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        for source in sources:
            merged = self._value(source, depth + 1, repeated)
            if isinstance(merged, dict):
                for key, value in merged.items():
                    values.setdefault(key, value)
            else:
                self.report(self._at(source.start_mark), "<<: takes a mapping or a list of mappings")

    def _refuse_character(self, content: bytes, position: int, character: str | int) -> None:
        code = character if isinstance(character, int) else ord(character)
        reason = f"the character U+{code:04X} is not allowed; remove it, or write it as an escape in double quotes"
        place = place_at(self.file, content, position)
        self.problems.append(Problem(place, f"not valid YAML: {reason}", kind=ProblemKind.YAML_SYNTAX))

    def _syntax_problem(self, error: yaml.YAMLError) -> Problem:
        place = self._at(getattr(error, "problem_mark", None) or getattr(error, "context_mark", None))
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        context = getattr(error, "context", None)
        where = f" {context}" if context else ""
        hint = "check indentation, quotes and tabs there; text with ': ' or '{{' must be quoted"
        return Problem(place, f"not valid YAML{where}: {reason}; {hint}", kind=ProblemKind.YAML_SYNTAX)


def _is_exact(value: float, text: str) -> bool:
    """Reports whether a number is stored with all the digits of its text."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return isfinite(value) and (":" in text or Decimal(text.replace("_", "")) == Decimal(repr(value)))


def place_at(file: str, content: bytes, position: int) -> Place:
    """Returns the place of a byte of a file."""
    before = content[:position]
    line_start = before.rfind(b"\n") + 1
    return Place(file, before.count(b"\n") + 1, len(before[line_start:].decode("utf-8", "replace")) + 1)


def texts_in(
    container: Any, key: Any, skipped: frozenset[str] = frozenset(), of: type[Any] = str
) -> Iterator[tuple[Any, Any, str, Any]]:
    """Texts at and below a key with their container, key and label (``url``, ``cmds[2]``), in file order.

    Keys of mappings that are ``skipped`` are left out. ``of`` is the type of other values to yield.
    """
    waiting: list[tuple[Any, Any, str]] = [(container, key, str(key))]
    while waiting:
        owner, name, label = waiting.pop()
        value = owner.get(name) if isinstance(owner, dict) else owner[name]
        if isinstance(value, dict):
            keys = [inner for inner in value if inner not in skipped]
            waiting.extend((value, inner, inner) for inner in reversed(keys))
        elif isinstance(value, list):
            waiting.extend((value, index, f"{label}[{index}]") for index in reversed(range(len(value))))
        elif isinstance(value, of):
            yield owner, name, label, value
