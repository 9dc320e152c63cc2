"""Reads one mapping of a playbook: keys under any of their spellings, unknown keys reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from math import isfinite
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError

from noetl_dagster.errors import Place, Problem, ProblemKind, TemplateError
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.fields import Declaration, Model, Seconds, declarations, spellings_of
from noetl_dagster.playbook.models import Input, PolicyAction
from noetl_dagster.playbook.pods import Pod
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.wording import described, did_you_mean, is_template, listed, suggestion

M = TypeVar("M", bound=Model)
E = TypeVar("E", bound=StrEnum)

_INVALID = ProblemKind.INVALID_VALUE
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*$")
_SECONDS = {"ms": 0.001, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_UNKNOWN_AT_ENTRY = frozenset({"iter", "loop", "_index", "output", "response", "results", "error", "_prev"})
"""Names that mean something only while a step's tasks run."""


class ReadContext:
    """Holds the state that all blocks of one playbook share.

    Attributes:
        workload: what templates in settings may use before a step is entered.
        rendered: settings that are templates, by the names in :attr:`templates`, as they were rendered when the
            step was entered.
        templates: settings of the present step that are templates, by the place that they stand in.
        metadata: what templates in Dagster's words may use.
        all_steps: the outermost layer of every spec.
        outer: of the keys in it, where they stand: the playbook's ``spec`` or ``executor.spec``.
        worker_pool: the pool of workers of steps that name none.
        run_pod: what the pod of a run is like; the outermost layer of every step's pod.
        settled: whether a setting was a template of the workload.
        jumps: targets of the present step's policies, with the action that names them; checked when
            all tasks of the step are known.
        fed: steps that take the chunks of another one while they are made.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.workload: dict[str, Any] = {}
        self.rendered: Mapping[str, Any] = {}
        self.templates: dict[str, str] = {}
        self.metadata: dict[str, Any] = {}
        self.all_steps: dict[str, Any] = {}
        self.outer: Mapping[str, str] = {}
        self.worker_pool: str | None = None
        self.run_pod: Pod | None = None
        self.settled = False
        self.jumps: list[tuple[str, Block]] = []
        self.fed: frozenset[str] = frozenset()

    def name_setting(self, what: str, key: str, template: str) -> str:
        """Notes a template under the name of its setting: ``loop.spec.max_in_flight``.

        Unnamed tasks of one step say the same of themselves; their settings are numbered.
        """
        owner, *path = what.split(", ")
        name = first = ".".join((*(() if owner.startswith("step ") else (owner,)), *path, key))
        number = 1
        while self.templates.setdefault(name, template) != template:
            number += 1
            name = f"{first} ({number})"
        return name

    def block(self, value: Any, what: str, place: Place) -> Block | None:
        """Returns a mapping as a block; reports anything else and returns None."""
        if isinstance(value, dict):
            return Block(self, value, what, place)
        self.document.report(place, f"{what}: expected a mapping (key: value), found {described(value)}")
        return None


class Block:
    """One mapping, named for messages (``step 'fetch'``). Keys are taken; :meth:`close` reports the rest.

    Attributes:
        asked: canonical names of the keys that were asked for, in this order; suggestions for unknown keys.
        outer: of keys that only the playbook's ``spec`` or ``executor.spec`` says, where they stand. What is wrong
            with such a value is wrong there, once.
    """

    def __init__(self, reading: ReadContext, values: dict[str, Any], what: str, place: Place) -> None:
        self.reading = reading
        self.document = reading.document
        self.values = values
        self.what = what
        self.place = place
        self.outer: Mapping[str, str] = {}
        self._taken: set[str] = set()
        self.asked: dict[str, None] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def rest(self) -> Iterator[str]:
        """Returns the keys that have not been taken yet."""
        return (key for key in self.values if key not in self._taken)

    def place_of(self, key: str) -> Place:
        """Returns the place of a value."""
        return self.document.place(self.values, key)

    def error(self, message: str, key: str | None = None, kind: ProblemKind = _INVALID) -> None:
        """Reports an error at a key's value, or at the block."""
        self._report(message, key, "error", kind)

    def missing(self, message: str) -> None:
        """Reports a field that the block lacks."""
        self._report(message, None, "error", ProblemKind.MISSING_FIELD)

    def conflict(self, message: str, key: str | None = None) -> None:
        """Reports a field that contradicts another one."""
        self._report(message, key, "error", ProblemKind.CONFLICTING_FIELDS)

    def warn(self, message: str, key: str | None = None, kind: ProblemKind = _INVALID) -> None:
        """Reports a warning at a key's value, or at the block."""
        self._report(message, key, "warning", kind)

    def _report(self, message: str, key: str | None, severity: str, kind: ProblemKind) -> None:
        place = self.place if key is None else self.place_of(key)
        problem = Problem(place, f"{self._owner(key)}: {message}", severity, kind)
        if problem not in self.document.problems:  # as of a value that several steps have from one place
            self.document.problems.append(problem)

    def _owner(self, key: str | None) -> str:
        return self.outer.get(key or "", self.what)

    def report_key(self, key: str, message: str, kind: ProblemKind, severity: str = "error") -> None:
        """Reports a problem at the key itself."""
        place = self.document.key_place(self.values, key)
        self.document.report(place, f"{self.what}: {message}", severity, kind)

    def spelled(self, *names: str) -> str | None:
        """Returns the first of ``names`` that is present and marks all as taken. Two at once are an error."""
        present = [name for name in names if name in self.values]
        self._taken.update(present)
        self.asked.setdefault(names[0])
        if len(present) > 1:
            both = " and ".join(map(repr, present))
            self.conflict(f"{both} mean the same; keep {present[0]!r}", present[1])
        return present[0] if present else None

    def _found(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """Returns the spelling of a value in the playbook and the value; None if it is missing."""
        key = self.spelled(*names)
        return (names[0], None) if key is None else (key, self.values[key])

    def take(self, *names: str) -> Any:
        """Returns the value under any spelling; None if it is missing."""
        return self._found(names)[1]

    def text(self, *names: str) -> str | None:
        """Reads a text; numbers are taken as written, mappings and lists are errors."""
        key, value = self._found(names)
        if isinstance(value, (dict, list)):
            self.error(f"{key} must be text, found {described(value)}", key)
            return None
        return None if value is None else str(value)

    def mapping(self, *names: str) -> dict[str, Any]:
        """Reads a mapping, empty if missing. Mappings under several spellings are merged."""
        present = [name for name in names if isinstance(self.values.get(name), dict)]
        if len(present) > 1:
            self._taken.update(present)
            both = " and ".join(map(repr, present))
            self.warn(f"{both} mean the same and are merged", present[1], ProblemKind.CONFLICTING_FIELDS)
            return {key: value for name in reversed(present) for key, value in self.values[name].items()}
        key, value = self._found(names)
        if value is not None and not isinstance(value, dict):
            self.error(f"{key} must be a mapping (key: value), found {described(value)}", key)
            return {}
        return value or {}

    def input(self, *names: str) -> Input:
        """Reads named values, or one template that gives them all."""
        key = self.present(*names)
        value = None if key is None else self.values[key]
        if not isinstance(value, str) or "{{" not in value:
            return self.mapping(*names)
        self.spelled(*names)
        return value

    def condition(self, *names: str) -> str | bool | None:
        """Reads a template or a boolean. Anything else is reported and counts as true."""
        key, value = self._found(names)
        if isinstance(value, (dict, list)):
            self.error(f"{key} must be a template or a boolean, found {described(value)}", key)
            return True
        return value if value is None or isinstance(value, bool) else str(value)

    def check_word(self, key: str, words: tuple[str, ...]) -> None:
        """Reports a value that is none of ``words``, in any case, unless it is a template."""
        value = self.values.get(key)
        word = str(value).lower() if isinstance(value, bool | str) else value
        if word is None or word in words or (isinstance(word, str) and "{{" in word):
            return
        self.error(f"{key} is {described(value)}; {suggestion(str(value), words, 'use one of')}", key)

    def child(self, *names: str, expected: str | None = None) -> Block | None:
        """Returns a nested mapping as a block, None if missing; reports anything else as not ``expected``."""
        key, value = self._found(names)
        if value is not None and not isinstance(value, dict) and expected is not None:
            self.error(f"{expected}, found {described(value)}", key)
            return None
        return None if value is None else self.reading.block(value, f"{self._owner(key)}, {key}", self.place_of(key))

    def nested(self, model: type[M], *names: str) -> M | None:
        """Reads a nested mapping into a model, None when missing."""
        child = self.child(*names)
        return None if child is None else child.read(model)

    def items(self, *names: str) -> list[Any]:
        """Reads a list, empty if missing; a single text or number counts as a list of one."""
        key, value = self._found(names)
        if isinstance(value, dict):
            self.error(f"{key} must be a list, found a mapping", key)
            return []
        return [] if value is None else value if isinstance(value, list) else [value]

    def blocks(self, key: str, what: str) -> Iterator[Block]:
        """Yields the mappings of a list, or the only one, named by ``what`` and number; reports everything else."""
        value = self.take(key)
        entries = value if isinstance(value, list) else [] if value is None else [value]
        for index, entry in enumerate(entries):
            place = self.document.place(value, index) if entries is value else self.place_of(key)
            block = self.reading.block(entry, f"{what} {index + 1}", place)
            if block is not None:
                yield block

    def with_constant_delay(self) -> Block:
        """Returns the block with a ``backoff`` of ``5`` or ``500ms`` as its ``delay``, which does not grow then."""
        value = self.values.get("backoff")
        if isinstance(value, str) and is_template(value):
            with suppress(TemplateError):  # reported where the word is read
                value = self.rendered(value)
        if isinstance(value, (bool, dict, list)) or _DURATION.match(str(value)) is None:
            return self
        delay = self.present(*spellings_of(PolicyAction, "delay"))
        if delay is not None:
            self.conflict(f"'backoff: {value}' and {delay!r} both say how long to wait; keep one", "backoff")
        others = [(self.values, name, name) for name in self.values if name != "backoff"]
        values = self.document.gathered([(self.values, "backoff", "delay"), *others])
        values["delay"] = value if delay is None else self.values.get("delay")
        block = Block(self.reading, values, self.what, self.place)
        block._taken, block.asked = self._taken, self.asked
        return block

    def flag(self, *names: str, default: bool = False) -> bool:
        """Reads a boolean, which may be written as text."""
        key, value = self._setting(names)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        word = value.strip().lower() if isinstance(value, str) else ""
        if word in ("true", "yes", "on", "false", "no", "off"):
            return word in ("true", "yes", "on")
        self.error(f"{key} must be true or false, found {described(value)}", key)
        return default

    def number(self, *names: str) -> float | None:
        """Reads a number, which may be written as text."""
        key, value = self._setting(names)
        if value is None:
            return None
        try:
            if isinstance(value, bool) or not isfinite(number := float(value)):
                raise ValueError
            return number
        except (TypeError, ValueError, OverflowError):
            self.error(f"{key} must be a number, found {described(value)}", key)
            return None

    def whole(self, *names: str) -> int | None:
        """Reads a whole number, which may be written as text."""
        number = self.number(*names)
        if number is not None and number != int(number):
            self.error(f"{names[0]} must be a whole number, found {number}", self.present(*names))
            return None
        return None if number is None else int(number)

    def seconds(self, *names: str) -> float | None:
        """Reads a duration: a number of seconds, or text such as '500ms', '30s', '5m', '1h'."""
        key, value = self._setting(names)
        if value is None:
            return None
        match = _DURATION.match(str(value)) if not isinstance(value, (dict, list, bool)) else None
        if match is None:
            self.error(f"{key} must be seconds or text such as '30s', found {described(value)}", key)
            return None
        seconds = float(match[1]) * _SECONDS[match[2]]
        if not isfinite(seconds):
            self.error(f"{key} is too large a number of seconds, found {described(value)}", key)
            return None
        return seconds

    def choice(self, kind: type[E], *names: str, also: Mapping[str, E] | None = None) -> E | None:
        """Reads a word of an enum or of ``also``; a template is rendered over the workload."""
        key, value = self._found(names)
        if isinstance(value, str) and is_template(value):
            try:
                value = self.rendered(value)
            except TemplateError as error:
                message = f"{key} must be known when the playbook is loaded, from its workload: {error}"
                self.error(message, key)
                return None
        if value is None:
            return None
        word = str(value).strip().lower()
        if also and word in also:
            return also[word]
        try:
            return kind(word)
        except ValueError:
            self.error(f"{key} is {value!r}; use one of {', '.join(kind)}", key)
            return None

    def names(self, *names: str) -> tuple[str, ...]:
        """Reads a list of texts."""
        return tuple(str(item) for item in self.items(*names))

    def build(self, model: type[M], **fields: Any) -> M | None:
        """Builds the model without the fields that are None; reports what it refuses."""
        present = {name: value for name, value in fields.items() if value is not None}
        try:
            return model(**present)
        except ValidationError as error:
            for detail in error.errors():
                name = ".".join(str(part) for part in detail["loc"])
                if detail["type"] == "missing":
                    meaning = model.model_fields[name].description
                    self.missing(f"{name!r} is missing{f': {meaning}' if meaning else ''}")
                    continue
                actual = described(detail["input"])
                message = f"{name}: {detail['msg'].lower()}, found {actual}"
                key = name.partition(".")[0]
                self.error(message, key if key in self.values else None)
            return None

    def read(self, model: type[M], **others: Any) -> M | None:
        """Reads a model from the keys that its fields declare, without ``others``, and reports all other keys."""
        fields = self.fields(model, **others)
        self.close()
        return self.build(model, **fields)

    def fields(self, model: type[BaseModel], **others: Any) -> dict[str, Any]:
        """Reads the fields of a model that are not among ``others``, by their declarations."""
        values = {one.name: self._declared(one) for one in declarations(model) if one.name not in others}
        return values | others

    def _declared(self, field: Declaration) -> Any:
        names, type_ = field.spellings, field.type
        if type_ is bool:
            return self.flag(*names, default=field.default)
        if get_origin(type_) is dict:
            return self.mapping(*names)
        if get_origin(type_) is tuple:
            return self.names(*names)
        if type_ in _READERS:
            return _READERS[type_](self, *names)
        if issubclass(type_, StrEnum):
            return self.choice(type_, *names, also=field.words)
        return self.nested(type_, *names)

    def close(self, keys: Iterable[str] = (), *, remedies: dict[str, str] | None = None, free: bool = False) -> None:
        """Reports every key that was not taken; ``keys``, or else those that were asked for, feed the suggestions.

        If other engines write ``free`` keys of their own here, those that are not like a known one are ignored.
        """
        keys = tuple(keys) or tuple(self.asked)
        for key in self.rest():
            remedy = (remedies or {}).get(key)
            if free and remedy is None and not did_you_mean(key, keys):
                message = f"{key!r} has no effect; known keys: {listed(keys)}"
                self.report_key(key, message, ProblemKind.FIELD_WITHOUT_EFFECT, "warning")
            else:
                message = f"unknown key {key!r}; {remedy or suggestion(key, keys)}"
                self.report_key(key, message, ProblemKind.UNKNOWN_FIELD)

    def take_rest(self) -> dict[str, Any]:
        """Returns all values that were not taken yet, unchanged."""
        left = {key: self.values[key] for key in self.rest()}
        self._taken.update(left)
        return left

    def drop(self, *names: str) -> None:
        """Accepts keys that have no meaning here."""
        self._taken.update(names)

    def present(self, *names: str) -> str | None:
        """Returns the first of several spellings that the mapping has."""
        return next((name for name in names if name in self.values), None)

    def _setting(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """Reads a number or a boolean. A template is rendered when the step is entered; it is None until then.

        One that needs the workload alone is rendered with what is known of it, so that mistakes show early.
        """
        key, value = self._found(names)
        if not isinstance(value, str) or not is_template(value):
            return key, value
        reading = self.reading
        name = reading.name_setting(self.what, key, value)
        if name in reading.rendered:
            return key, reading.rendered[name]
        try:
            used = compile_value(value).names
        except TemplateError:
            return key, None  # reported with every other template that does not parse
        later = sorted(used & _UNKNOWN_AT_ENTRY - reading.workload.keys())
        if later:
            self.error(f"{key} is settled when the step is entered, and {later[0]!r} is not known then", key)
        elif used <= {"workload", *reading.workload}:
            try:
                return key, self.rendered(value)
            except TemplateError as error:
                self.warn(f"{key} must come with the workload of the execution: {error}", key)
        return key, None

    def rendered(self, template: str) -> Any:
        """Renders a template over the workload."""
        workload = self.reading.workload
        self.reading.settled = True
        return compile_value(template).render({"workload": workload, **workload})


_READERS: dict[Any, Callable[..., Any]] = {
    Seconds: Block.seconds,
    Any: Block.take,
    str: Block.text,
    int: Block.whole,
    float: Block.number,
}
"""Reads a value of a type, under any of its spellings."""
