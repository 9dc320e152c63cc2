"""Defines the Jinja environment of playbooks: sandboxed, strict about names, keys before methods."""

from __future__ import annotations

import base64
import datetime as dt
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sized
from decimal import Decimal
from functools import wraps
from typing import Any
from uuid import UUID

import orjson
from jinja2 import TemplateSyntaxError, Undefined, UndefinedError, nodes, pass_environment
from jinja2.compiler import CodeGenerator
from jinja2.filters import do_first, make_attrgetter, sync_do_sum
from jinja2.meta import TrackingCodeGenerator
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.templates.views import DataView, View, plain, unwrapped
from noetl_dagster.playbook.wording import described, did_you_mean, listed
from noetl_dagster.values import admit, encode_json


def sql_literal(value: Any) -> str:
    """Formats a value as one SQL constant that no content can break out of.

    None is ``NULL``, numbers and booleans stand bare, text is quoted, dates and times are quoted ISO 8601,
    bytes a ``bytea`` constant, mappings and lists quoted JSON.

    Raises:
        TemplateError: for other types, and for text with NUL, which SQL cannot hold.
    """
    value = _known(value)
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(int(value)) if value >= 0 else f"({int(value)})"
    if isinstance(value, float | Decimal):
        text = str(value)
        if not Decimal(text).is_finite():
            return f"'{text}'"
        return f"({text})" if text.startswith("-") else text
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dt.date | dt.time):
        return _quoted(value.isoformat())
    if isinstance(value, UUID):
        return _quoted(str(value))
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'"
    if isinstance(value, Mapping | list | tuple):
        return _quoted(json.dumps(value, ensure_ascii=False, default=admit))
    raise TemplateError(f"sql_literal: a value of type {type(value).__name__} has no SQL form")


def sql_list(values: Any) -> str:
    """Formats a list as ``(1, 'b', NULL)`` for ``IN``; an empty one as ``(NULL)``, which matches nothing."""
    values = _known(values)
    if not isinstance(values, list | tuple | set | frozenset):
        raise TemplateError(f"sql_list: a list is needed, not {type(values).__name__}")
    return f"({', '.join(map(sql_literal, values)) or 'NULL'})"


def sql_identifier(value: Any) -> str:
    """Quotes a name or a dotted one as identifiers: ``public.my table`` -> ``"public"."my table"``."""
    value = _known(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise TemplateError(f"sql_identifier: a name is needed, not {value!r}")
    parts = value.split(".")
    if not all(parts):
        raise TemplateError(f"sql_identifier: {value!r} has an empty part")
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def shell_quote(value: Any) -> str:
    """Quotes a value as one word of a POSIX shell command; a list as one word for each of its items.

    None is an empty word, true and false are written so, a mapping is JSON.

    Raises:
        TemplateError: for text with NUL, which no command can have.
    """
    value = _known(value)
    if isinstance(value, list | tuple | set | frozenset):
        return " ".join(map(shell_quote, value))
    text = "" if value is None else text_of(value)
    if "\0" in text:
        raise TemplateError("shell_quote: a command cannot have a NUL character")
    return shlex.quote(text)


def path_part(value: Any) -> str:
    """Formats a value as one component of a path or of an object's key, which never leads to another folder.

    Characters that separate or select paths, control characters, ``%`` and a leading dot are percent-encoded, so
    different values stay different: ``../a`` is ``%2E.%2Fa``.

    Raises:
        TemplateError: for an empty value, and for lists and mappings.
    """
    value = _known(value)
    if value is None or value == "" or isinstance(value, Mapping | list | tuple | set | frozenset):
        raise TemplateError(f"path_part: one name is needed, not {value!r:.40}")
    return _NOT_IN_PATHS.sub(lambda match: f"%{ord(match[0]):02X}", text_of(value))


def next_url(link: Any, page: Any) -> str:
    """Returns the address of the page that a page links to; the link may be relative.

    Raises:
        TemplateError: it is on another server, which must not get the headers of the request.
    """
    from yarl import URL  # only where there are pages

    here, link = URL(str(_known(page)), encoded=True), str(_known(link))
    there = here.join(URL(link, encoded=True))
    if there.scheme not in ("http", "https") or there.origin() != here.origin():
        raise TemplateError(f"the page {here} leads to {there}, another server, which must not get its headers")
    return str(there)


_NOT_IN_PATHS = re.compile(r"^\.|[/\\%?#*\[\]\x00-\x1f\x7f]")


def text_of(value: Any) -> str:
    """Returns a value as text, as requests, environments, commands and paths contain it.

    Text stays. Numbers, true, false, mappings and lists are written as JSON, dates and times in ISO 8601.

    Raises:
        RefusedValueError: a part of a mapping or list has no JSON form.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, Mapping | list | tuple | bool):
        return encode_json(admit(value, "the value")).decode()
    return value.isoformat() if isinstance(value, dt.date | dt.time) else str(value)


SENT = "__sent__"
"""The filter of every value inside a text that is sent."""


def _sent(value: Any) -> str:
    value = _known(value)
    if value is None:
        raise ValueError("a value in a text that is sent is null; write {{ value or '' }}, or nothing beside it")
    return text_of(value)


def _known(value: Any) -> Any:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    return plain(value) if isinstance(value, View) else value


def _quoted(text: str) -> str:
    """Formats a string constant that is independent of ``standard_conforming_strings``."""
    if "\0" in text:
        raise TemplateError("sql_literal: text with a NUL character cannot stand in SQL")
    escaped = text.replace("'", "''")
    if "\\" in escaped:
        doubled = escaped.replace("\\", "\\\\")
        return f" E'{doubled}'"
    return f"'{escaped}'"


_MAPPING_METHODS = frozenset({"get", "items", "keys", "values"})
# they know views, or need no value
_LAZY_FILTERS = frozenset({"count", "d", "default", "first", "length", "tojson", "to_json"})
_TESTS_OF_TYPES = (
    "boolean", "false", "float", "integer", "iterable", "lower", "mapping", "none", "number", "sameas", "sequence",
    "string", "true", "upper",
)  # fmt: skip


OPTIONAL_PARTS = frozenset({"error", "http", "pg", "py", "playbook", "ref", "_ref", "status_code"})
"""Names and keys that are missing by design, such as the error of a success."""


class OptionalPartError(UndefinedError):
    """One of the ``OPTIONAL_PARTS`` is missing, or a key of null."""


class UnknownName(Undefined):
    """False in boolean tests, replaced by ``default``, chainable; an error wherever its value is needed.

    Attributes:
        is_optional: whether it is one of the ``OPTIONAL_PARTS``, or a key of null.
    """

    __slots__ = ("is_optional",)

    def __init__(self, hint: str | None = None, obj: Any = missing, name: Any = None) -> None:
        self.is_optional = obj is None or name in OPTIONAL_PARTS
        super().__init__(hint, obj, name, OptionalPartError if self.is_optional else UndefinedError)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def _needed(self, *arguments: Any, **named: Any) -> Any:
        self._fail_with_undefined_error()

    __iter__ = __str__ = __len__ = __eq__ = __ne__ = __hash__ = __contains__ = _needed  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = _needed  # type: ignore[assignment]

    @property
    def _undefined_message(self) -> str:
        message, owner = f"{str(self._undefined_name)!r} is undefined", self._undefined_obj
        if owner is missing:  # a bare name
            return message
        message += ": the result" if isinstance(owner, View) else ": the value"
        value = unwrapped(owner)
        if not isinstance(value, Mapping):
            return f"{message} is {described(value)}"
        keys = tuple(map(str, value))
        near = did_you_mean(str(self._undefined_name), keys)
        message += f" has the keys {listed(keys)}" if keys else " is empty"
        return f"{message}; {near}" if near else message


class StrictName(UnknownName):
    """An error in boolean tests, too, unless it is an optional part."""

    __slots__ = ()

    def __bool__(self) -> bool:
        if not self.is_optional:
            self._fail_with_undefined_error()
        return False


class ScopeContext(Context):
    """Resolves names straight from a scope, so that no scope is ever copied to render a template."""

    def __init__(self, environment: PlaybookEnvironment, scope: Mapping[str, Any]) -> None:
        self.parent = scope  # type: ignore[assignment]
        self.vars = {}
        self.environment = environment
        self.eval_ctx = environment.evaluation
        self.exported_vars = set()
        self.name = None
        self.globals_keys = set()
        self.blocks = {}

    def resolve_or_missing(self, key: str) -> Any:
        """Looks up a name in the template's own variables, the scope and Jinja's globals."""
        if key in self.vars:
            return self.vars[key]
        try:
            return self.parent[key]
        except KeyError:
            return self.environment.globals.get(key, missing)


class TooComplexError(TemplateSyntaxError):
    """A template exceeds a limit; it may be well-formed."""


DEEPEST_TREE = 100
"""Levels of a tree, to which each operator and attribute of a chain adds one. Jinja's compiler recurses."""

MOST_BITS = 14_000
"""The largest integers; Python refuses to write those above 4,300 digits."""

MOST_REPEATED = 10_000_000
"""The longest text or list that ``*`` or the width of a format may give."""

_WIDE = re.compile(r"%(?:\([^)]*\))?[^%a-zA-Z]*(?:\d{6}|\*)")


class _NothingComputed:
    """Makes a code generator compute nothing: a constant expression may be long, or fail where it is never reached."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.Const | nodes.TemplateData):
            raise nodes.Impossible
        return str(super()._output_child_to_const(node, frame, finalize))  # type: ignore[misc]


class _PlaybookCodeGenerator(_NothingComputed, CodeGenerator):
    pass


class _NameFinder(_NothingComputed, TrackingCodeGenerator):
    pass


def undeclared_names(tree: nodes.Template) -> set[str]:
    """Returns the names that a template does not define itself, as Jinja's ``find_undeclared_variables``."""
    assert tree.environment is not None
    finder = _NameFinder(tree.environment)
    finder.optimizer = None
    finder.visit(tree)
    return finder.undeclared_identifiers


class PlaybookEnvironment(ImmutableSandboxedEnvironment):
    """Keys win over methods (``row.items`` is the column ``items``), and only harmless methods remain.

    A few characters of ``*``, ``**`` and ``%`` can make values that exceed all memory: these operators have limits.
    """

    code_generator_class = _PlaybookCodeGenerator
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, undefined: type[UnknownName] = UnknownName) -> None:
        super().__init__(undefined=undefined, extensions=["jinja2.ext.do"], optimized=False)
        del self.globals["lipsum"]
        self.evaluation = EvalContext(self)
        filters: Mapping[str, Any] = {**self.filters, **FILTERS}
        tests: Mapping[str, Any] = self.tests
        self.filters |= {
            name: function if name in _LAZY_FILTERS else _of_values(function) for name, function in filters.items()
        }
        self.tests |= {name: _of_values(tests[name]) for name in _TESTS_OF_TYPES}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes ``*``, ``**`` or ``%``; raises TemplateError for what would give too large a value."""
        left, right = unwrapped(left), unwrapped(right)
        match operator, left, right:
            case "%", int() | float(), _:
                pass
            case "%", str() | bytes(), _:
                if _WIDE.search(left if isinstance(left, str) else left.decode("latin-1")):
                    raise TemplateError("'%' with a width from another value, or above 99,999; pad in a python step")
            case _, int(), int():
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if bits > MOST_BITS:
                    raise TemplateError(
                        f"'{operator}' gives an integer of more than {MOST_BITS:,} bits; compute with floats"
                    )
            case ("*", Sized(), int()) | ("*", int(), Sized()):
                items, times = (left, right) if isinstance(right, int) else (right, left)
                if len(items) * times > MOST_REPEATED:
                    raise TemplateError(f"'*' gives more than {MOST_REPEATED:,} items; compute this in a python step")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Looks up a key, which wins over a method of the same name."""
        if obj.__class__ is dict and attribute in obj:  # most lookups
            return obj[attribute]
        if isinstance(obj, (View, Mapping)):
            return self._from_mapping(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Looks up a key of a view, or subscripts any other value."""
        if isinstance(obj, View):
            return self._from_mapping(obj, argument)
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Finds a method of the text or list behind a result when it is called: uncalled, its name is a key."""
        if isinstance(obj, UnknownName) and isinstance(obj._undefined_obj, View):
            obj = super().getattr(unwrapped(obj._undefined_obj), str(obj._undefined_name))
        return super().call(context, obj, *args, **kwargs)

    def _from_mapping(self, obj: Any, key: Any) -> Any:
        try:
            return obj[key]
        except (LookupError, TypeError):
            if key in _MAPPING_METHODS:
                return getattr(obj, key)
            return self.undefined(obj=obj, name=key)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        try:
            tree = super()._parse(source, name, filename)
        except RecursionError:
            raise TooComplexError("nested too deep; compute parts in steps of their own", 1) from None
        except (ValueError, OverflowError) as error:  # a number of thousands of digits
            raise TooComplexError(str(error), 1) from None
        level: list[nodes.Node] = [tree]
        for _ in range(DEEPEST_TREE):
            level = [child for node in level for child in node.iter_child_nodes()]
        if level:
            raise TooComplexError(f"nested deeper than {DEEPEST_TREE} levels; compute parts in steps of their own", 1)
        return tree

    def function(self, template: nodes.Template) -> Callable[[ScopeContext], Any]:
        """Compiles a parsed template to the generator function behind it."""
        try:
            code = self.compile(template, filename="<template>")
        except (SyntaxError, RecursionError, MemoryError) as error:  # of Python, which has bounds of its own
            raise TemplateSyntaxError(f"too complex; compute parts in steps of their own ({error})", 1) from None
        return self.template_class.from_code(self, code, self.globals).root_render_func


def _of_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter or test of Jinja: it gets the values behind views."""

    @wraps(function)
    def of_values(*arguments: Any, **named: Any) -> Any:
        if arguments[0].__class__ is StrictName:
            bool(arguments[0])
        return function(*[unwrapped(argument) for argument in arguments], **named)

    return of_values


def to_json(value: Any, indent: int | None = None) -> str:
    """Formats plain JSON; it is not escaped for HTML, since no playbook writes pages with it."""
    if indent is not None and not -1 < indent <= 100:
        raise TemplateError(f"tojson: indent must be from 0 to 100, found {indent!r:.20}")
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_to_json_value)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    simple = plain(value)
    return simple if simple is not value else str(value)


@pass_environment
def first(environment: PlaybookEnvironment, value: Any) -> Any:
    """Returns the first item; of stored rows without fetching all of them."""
    if isinstance(value, DataView) and value.is_rows and value:
        return value[0]
    return do_first(environment, unwrapped(value))


@pass_environment
def summed(environment: PlaybookEnvironment, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Adds numbers, or joins lists in linear time."""
    if not isinstance(start, list | tuple):
        return sync_do_sum(environment, value, attribute, start)
    joined = list(start)
    for item in value if attribute is None else map(make_attrgetter(environment, attribute), value):
        part = unwrapped(item)
        if part.__class__ is not start.__class__:
            return start + part  # Python's own error
        joined += part
    return start.__class__(joined)


def _base64(value: Any) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else str(value).encode()).decode()


FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": to_json,
    "to_json": to_json,
    "fromjson": orjson.loads,
    "from_json": orjson.loads,
    "b64encode": _base64,
    "b64decode": lambda text: base64.b64decode(text).decode(),
    "first": first,
    "sum": summed,
    "sql_literal": sql_literal,
    "sql_list": sql_list,
    "sql_identifier": sql_identifier,
    "shell_quote": shell_quote,
    "path_part": path_part,
    "next_url": next_url,
    SENT: _sent,
}
