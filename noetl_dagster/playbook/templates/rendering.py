"""The one place that renders templates: strings, lists and mappings of a playbook against a scope.

A string that is exactly one expression keeps the type of its value; any other renders to text.
Sources are parsed once per process and compiled to Python on their first rendering, so ten thousand
iterations of a loop pay once.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError, Undefined, UndefinedError, nodes

from noetl_dagster.errors import NoetlError, TemplateError, UndefinedNameError
from noetl_dagster.playbook.templates.environment import (
    SENT,
    OptionalPartError,
    ScopeContext,
    TooComplexError,
    UnknownName,
    undeclared_names,
)
from noetl_dagster.playbook.templates.reading import ENVIRONMENT, STRICT_ENVIRONMENT, Foreign, read, whole_expression
from noetl_dagster.playbook.templates.views import (
    LAZY_SEQUENCES,
    LEAVES,
    LazyMapping,
    ReferenceNeeded,
    View,
    plain,
)
from noetl_dagster.playbook.wording import did_you_mean, listed
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.values import admit, keys_in_order

Evaluate = Callable[[Mapping[str, Any]], Any]
Fetch = Callable[[ResultRef], Awaitable[Any]]
T = TypeVar("T")

CACHED_TEMPLATES = 16_384
_FALSE_TEXTS = frozenset({"false", "0", "no", "none", ""})
_PATH = re.compile(r"\s*\{\{\s*([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*\s*\}\}\s*\Z", re.ASCII)
_WORDS = frozenset({"true", "false", "none", "not", "and", "or", "in", "is", "if", "else"})
_PARTS = (nodes.Name, nodes.Getattr, nodes.Getitem)
_RESULT = "__result__"
ENDS_IN_TOJSON = re.compile(r"\|\s*tojson\s*(\([^()]*\))?\s*-?\}\}\Z")
"""A template whose text is the JSON of a value."""

_SHOWN_NAMES = 30
_NOT_PLAIN = (View, LazyMapping, *LAZY_SEQUENCES)
_NO_NAMES: frozenset[str] = frozenset()
BRACES_REMEDY = "write {% raw %} and {% endraw %} around what another program reads"


class Compiled:
    """A value of a playbook, ready to be rendered any number of times: itself if it holds no template at all.

    Attributes:
        source: the value as it stands in the playbook.
        constant: whether it holds no template; then ``render`` ignores its scope.
        names: the root names that its templates use.
        is_expression: whether it is exactly one ``{{ expression }}``, which keeps its type.
        is_composed: whether it is text around expressions, which gives a text.
        is_fresh: whether ``render`` gives a value that nothing else holds, so that it need not be copied.
        is_strict: whether a boolean test of an unknown name is an error.
        foreign: of a text, braces of other programs in it, which stay as they are.
    """

    constant = True
    is_strict = False
    is_expression = False
    is_composed = False
    is_fresh = False

    __slots__ = ("foreign", "names", "source")

    def __init__(self, source: Any, names: frozenset[str] = _NO_NAMES, foreign: tuple[Foreign, ...] = ()) -> None:
        self.source = source
        self.names = names
        self.foreign = foreign

    def render(self, scope: Mapping[str, Any]) -> Any:
        """Returns the value in ``scope``, without views. It may be part of the scope: change only a copy (``plain``).

        Raises:
            UndefinedNameError: a name is not known in the scope.
            TemplateError: anything else that goes wrong inside a template.
            ReferenceNeeded: a stored result has to be fetched first; see :func:`render_async`.
        """
        return self.source

    def render_over(self, scope: Mapping[str, Any], before: Any, place: str) -> Any:
        """Renders an admitted copy that reuses the unchanged parts of ``before`` (``_grown``).

        Raises:
            RefusedValueError: the value has no stored form; ``place`` is its name.
        """
        return _grown(self.render(scope), before, place)

    def evaluate(self, scope: Mapping[str, Any]) -> Any:
        """Renders like ``render``, but views stay views and an unknown name is returned as a false object."""
        return self.render(scope)

    def holds(self, scope: Mapping[str, Any]) -> bool:
        """Reports whether it is true in ``scope``, as the condition of a ``when``.

        Raises:
            UndefinedNameError: an unknown name is compared, printed or computed with, or is the value; testing its
                truth, ``is defined`` and ``default`` are allowed.
        """
        return is_true(self.evaluate(scope))

    @property
    def is_about_failures(self) -> bool:
        """Reports whether it holds of failures only: it looks at ``error`` alone, and does not hold without one.

        One without any name does not say what it is about, and counts as one about failures.
        """
        try:
            return not self.names or (self.names == {"error"} and not self.holds({}))
        except TemplateError:
            return True


def _grown(value: Any, before: Any, place: str) -> Any:
    """Admits a value, but shares what is in ``before`` already: appending to a list costs what is new.

    Args:
        before: an admitted value that does not change any more, such as what ``value`` replaces; it must be held by
            the caller, for its parts are known by their identity.
        place: name of the value.
    """
    if value is before:
        return before
    if type(value) is list and type(before) is list:
        if all(map(is_, value, before)):  # it was appended to
            return before[: len(value)] + admit(value[len(before) :], f"{place}, from [{len(before)}] on:")
        parts_before = {id(item) for item in before}
        return [
            item if id(item) in parts_before else admit(item, f"{place}[{index}]") for index, item in enumerate(value)
        ]
    if type(value) is dict and type(before) is dict and (keys := keys_in_order(value)) is not None:
        return {
            key: before[key]
            if key in before and value[key] is before[key]
            else _grown(value[key], before.get(key), f"{place}.{key}")
            for key in keys
        }
    return admit(value, place)


class _Template(Compiled):
    """Common part of expression and text: compiled to Python on first use, errors in domain terms."""

    constant = False

    __slots__ = ("_function", "_text", "is_strict")

    def __init__(self, source: str, names: frozenset[str], text: str, foreign: tuple[Foreign, ...] = ()) -> None:
        super().__init__(source, names, foreign)
        self._text = text
        self.is_strict = False
        self._function: Evaluate | None = None

    def evaluate(self, scope: Mapping[str, Any]) -> Any:
        try:
            return (self._function or self._compiled())(scope)
        except (NoetlError, ReferenceNeeded):
            raise
        except Exception as error:
            raise self._failed(error, scope) from error

    def _compiled(self) -> Evaluate:
        """Parses again, since a playbook of thousands of templates should not keep a tree for each."""
        try:
            self._function = self._of_tree((STRICT_ENVIRONMENT if self.is_strict else ENVIRONMENT).parse(self._text))
        except TemplateSyntaxError as error:
            raise _syntax_error(self.source, error) from None
        return self._function

    def _of_tree(self, tree: nodes.Template) -> Evaluate:
        raise NotImplementedError

    def _failed(self, error: Exception, scope: Mapping[str, Any]) -> NoetlError:
        if isinstance(error, UndefinedError):
            names = _known_names(scope, self.names)
            return UndefinedNameError(f"{shown(self.source)}: {error.message}; {names}")
        return TemplateError(f"{shown(self.source)}: {type(error).__name__}: {error}")


class _Expression(_Template):
    """Exactly one ``{{ expression }}``: keeps the type of its value."""

    is_expression = True

    __slots__ = ("is_fresh",)

    def __init__(
        self, source: str, names: frozenset[str], text: str, *, may_build: bool, function: Evaluate | None = None
    ) -> None:
        super().__init__(source, names, text)
        # a bare path leads to data as stored; only built values can hold views deep inside
        self.is_fresh = may_build
        self._function = function

    def _of_tree(self, tree: nodes.Template) -> Evaluate:
        expression = whole_expression(tree)
        assert expression is not None
        environment: Any = tree.environment
        # {% set __result__ = expression %}: the value is read from the context, never made text
        assign = nodes.Template([nodes.Assign(nodes.Name(_RESULT, "store"), expression, lineno=1)], lineno=1)
        assign.set_environment(environment)
        generated = environment.function(assign)

        def evaluate(scope: Mapping[str, Any]) -> Any:
            context = ScopeContext(environment, scope)
            for _ in generated(context):
                pass
            return context.vars[_RESULT]

        return evaluate

    def holds(self, scope: Mapping[str, Any]) -> bool:
        try:
            value = self.evaluate(scope)
        except UndefinedNameError as error:
            if isinstance(error.__cause__, OptionalPartError):
                return False
            raise
        if not isinstance(value, UnknownName):
            return is_true(value)
        if value.is_optional or (not self.is_strict and _is_guard(self._text, value._undefined_name)):
            return False
        raise self._failed(UndefinedError(value._undefined_message), scope)

    def render_over(self, scope: Mapping[str, Any], before: Any, place: str) -> Any:
        return _grown(self._defined(scope), before, place)

    def render(self, scope: Mapping[str, Any]) -> Any:
        value = self._defined(scope)
        if value.__class__ in LEAVES:  # most
            return value
        try:
            return self._plain(value)
        except (NoetlError, ReferenceNeeded):
            raise
        except RecursionError:
            raise TemplateError(f"{shown(self.source)}: its value is nested too deep") from None
        except Exception as error:  # filters such as map work when their items are read
            raise self._failed(error, scope) from error

    def _plain(self, value: Any) -> Any:
        if isinstance(value, _NOT_PLAIN):
            return plain(value)
        if (self.is_fresh or _holds_views(value)) and isinstance(value, (list, tuple, dict)):
            return plain(value)
        return value

    def _defined(self, scope: Mapping[str, Any]) -> Any:
        value = self.evaluate(scope)
        if isinstance(value, Undefined):
            if isinstance(value, UnknownName):
                raise self._failed(UndefinedError(value._undefined_message), scope)
            return None  # an inline if without else
        return value


@lru_cache(maxsize=CACHED_TEMPLATES)
def _is_guard(text: str, name: str | None) -> bool:
    """Reports whether a condition tests a name for what follows it, as in ``paging and paging.next``."""
    for both in ENVIRONMENT.parse(text).find_all(nodes.And):
        guard = both.left.right if isinstance(both.left, nodes.And) else both.left
        parts = [guard, *guard.find_all(_PARTS)]
        is_tested = any(name == getattr(part, "attr", getattr(part, "name", None)) for part in parts)
        if is_tested and guard in both.right.find_all(_PARTS):
            return True
    return False


class _Text(_Template):
    """Text with templates in it."""

    is_composed = True

    __slots__ = ()

    def render(self, scope: Mapping[str, Any]) -> Any:
        return self.evaluate(scope)

    def _of_tree(self, tree: nodes.Template) -> Evaluate:
        environment: Any = tree.environment
        generated = environment.function(tree)

        return lambda scope: "".join(generated(ScopeContext(environment, scope)))


class _SentText(_Text):
    """Text of a request or an environment: values in it are written as those beside it."""

    __slots__ = ()

    def _of_tree(self, tree: nodes.Template) -> Evaluate:
        for output in list(tree.find_all(nodes.Output)):
            output.nodes = [
                part if isinstance(part, nodes.TemplateData) else nodes.Filter(part, SENT, [], [], None, None)
                for part in output.nodes
            ]
        return super()._of_tree(tree.set_environment(ENVIRONMENT).set_lineno(1))  # type: ignore[arg-type]


class _List(Compiled):
    constant = False

    __slots__ = ("_items",)

    def __init__(self, source: list[Any], items: list[Compiled]) -> None:
        super().__init__(source, _NO_NAMES.union(*(item.names for item in items)))
        self._items = items

    def render(self, scope: Mapping[str, Any]) -> list[Any]:
        return [item.render(scope) for item in self._items]


class _Mapping(Compiled):
    constant = False

    __slots__ = ("_items",)

    def __init__(self, source: Mapping[Any, Any], items: list[tuple[Compiled, Compiled]]) -> None:
        super().__init__(source, _NO_NAMES.union(*(part.names for item in items for part in item)))
        self._items = items

    def render(self, scope: Mapping[str, Any]) -> dict[Any, Any]:
        return {key.render(scope): value.render(scope) for key, value in self._items}


def compile_value(value: Any, *, command: bool = False, sent: bool = False, strict: bool = False) -> Compiled:
    """Compiles strings, also inside lists and mappings; raises TemplateError if one does not parse.

    Args:
        command: they belong to a command, in which braces of other programs stay as they are.
        sent: they belong to a request or an environment, in which values are spelled as :func:`text_of` does.
        strict: of a text, boolean tests of unknown names are errors.
    """
    if isinstance(value, str):
        return _compile_strict(value) if strict else _compile_text(value, command, sent)
    if isinstance(value, Mapping):
        parts = [(compile_value(key), compile_value(item, command=command, sent=sent)) for key, item in value.items()]
        return _compiled_mapping(value, parts)
    if isinstance(value, (list, tuple)):
        items = [compile_value(item, command=command, sent=sent) for item in value]
        return Compiled(value) if all(item.constant for item in items) else _List(list(value), items)
    return Compiled(value)


def compile_fields(fields: Mapping[str, Any], commands: Container[str], sent: Container[str]) -> Compiled:
    """Compiles the fields of a task, of which some hold ``commands``, and some are ``sent``."""
    parts = [
        (compile_value(key), compile_value(value, command=key in commands, sent=key in sent))
        for key, value in fields.items()
    ]
    return _compiled_mapping(fields, parts)


def _compiled_mapping(source: Mapping[Any, Any], parts: list[tuple[Compiled, Compiled]]) -> Compiled:
    constant = all(key.constant and item.constant for key, item in parts)
    return Compiled(source) if constant else _Mapping(source, parts)


@lru_cache(maxsize=CACHED_TEMPLATES)
def _compile_strict(source: str) -> Compiled:
    compiled = _compile_text.__wrapped__(source, False, False)
    if isinstance(compiled, _Template):
        compiled.is_strict = True
    return compiled


@lru_cache(maxsize=CACHED_TEMPLATES)
def _compile_text(source: str, command: bool, sent: bool) -> Compiled:
    if "{{" not in source and "{%" not in source and "{#" not in source:
        return Compiled(source)
    found_path = _PATH.match(source)
    if found_path is not None and found_path[1].lower() not in _WORDS:  # most templates: nothing to parse before use
        names = frozenset((found_path[1],)) - ENVIRONMENT.globals.keys()
        root, *keys = source.strip().strip("{}").strip().split(".")
        return _Expression(source, names, source, may_build=False, function=_path(root, keys))
    try:
        text_read, tree = read(source, command=command)
        names = _names(tree) - ENVIRONMENT.globals.keys()
    except TemplateSyntaxError as error:
        raise _syntax_error(source, error, command) from None
    expression = whole_expression(tree)
    if text_read.is_plain:
        return Compiled(source, foreign=text_read.foreign)
    if expression is None:
        return (_SentText if sent else _Text)(source, names, text_read.text, text_read.foreign)
    return _Expression(source, names, text_read.text, may_build=not _is_path(expression))


def _path(root: str, keys: Sequence[str]) -> Evaluate:
    """Returns the function that evaluates ``root.key.key`` without generated code: most templates are such paths."""
    globals_, undefined, attribute = ENVIRONMENT.globals, ENVIRONMENT.undefined, ENVIRONMENT.getattr

    def evaluate(scope: Mapping[str, Any]) -> Any:
        try:
            value = scope[root]
        except KeyError:
            value = globals_[root] if root in globals_ else undefined(name=root)
        for key in keys:
            value = value[key] if value.__class__ is dict and key in value else attribute(value, key)
        return value

    return evaluate


def _names(tree: nodes.Template) -> frozenset[str]:
    """Returns the names that a template takes from its scope; raises for unknown filters and tests."""
    names: set[str] = set()
    waiting: list[nodes.Node] = [tree]
    binds = False
    while waiting:
        node = waiting.pop()
        match node:
            case nodes.Name(name=name, ctx=context):
                names.add(name)
                binds = binds or context != "load"
            case nodes.Filter(name=name) if name not in ENVIRONMENT.filters:
                raise TemplateSyntaxError(f"no filter is called {name!r}", node.lineno)
            case nodes.Test(name=name) if name not in ENVIRONMENT.tests:
                raise TemplateSyntaxError(f"no test is called {name!r}", node.lineno)
        for field in node.fields:
            value = getattr(node, field, None)
            if isinstance(value, nodes.Node):
                waiting.append(value)
            elif isinstance(value, list):
                waiting.extend(item for item in value if isinstance(item, nodes.Node))
    # names bound inside need Jinja's own, slower analysis of what is visible where
    return frozenset(undeclared_names(tree) if binds else names)


def _holds_views(value: Any) -> bool:
    """Reports whether a list or mapping was made by a view, as the results of a loop are."""
    if isinstance(value, dict):
        return isinstance(next(iter(value.values()), None), View)
    return isinstance(value, list) and bool(value) and isinstance(value[0], View)


def _is_path(expression: nodes.Node) -> bool:
    while isinstance(expression, (nodes.Getattr, nodes.Getitem)):
        expression = expression.node
    return isinstance(expression, (nodes.Name, nodes.Const))


def _syntax_error(source: str, error: TemplateSyntaxError, command: bool = False) -> TemplateError:
    line = f", line {error.lineno} of the text" if source.count("\n") else ""
    remedy = f"; {BRACES_REMEDY}" if command and not isinstance(error, TooComplexError) else ""
    reason = str(error.message).rstrip(".")
    return TemplateError(f"template {shown(source)} does not parse{line}: {reason}{remedy}")


def shown(source: Any, limit: int = 160) -> str:
    """Shortens a template for an error message."""
    text = " ".join(str(source).split())
    return repr(text if len(text) <= limit else f"{text[:limit]}...")


def _known_names(scope: Mapping[str, Any], wanted: Iterable[str]) -> str:
    """Formats 'known names: a, b, c' of a scope, with suggestions for missing ones, for error messages."""
    list_names = getattr(scope, "known_names", None)
    names = tuple(list_names() if list_names is not None else sorted(map(str, scope)))
    later = getattr(scope, "later_steps", ())
    hints = [
        f"step {name!r} has not run yet" if name in later else did_you_mean(name, names)
        for name in sorted(wanted)
        if name not in scope
    ]
    return "; ".join([f"known names: {listed(names, _SHOWN_NAMES)}", *filter(None, hints)])


def is_true(value: Any) -> bool:
    """Returns the truth of a ``when``: the texts false, 0, no, none (in any case) and empty text are false."""
    if value is True or value is False:  # most
        return value
    if isinstance(value, View):
        value = value.plain()
    if isinstance(value, str):
        return value.strip().lower() not in _FALSE_TEXTS
    return bool(value)


def condition(value: str | bool | None, *, strict: bool = False) -> Compiled:
    """Compiles a ``when``: None holds always, a boolean is taken as it is."""
    return compile_value(True if value is None else value, strict=strict)


def undecided(what: str, reasons: Sequence[str]) -> UndefinedNameError:
    """Returns the error that no arc or rule applies because of undefined names."""
    reason = "; ".join((*reasons, "write default(false) for what may be missing"))
    return UndefinedNameError(f"no {what} could be decided: {reason}")


async def with_references(fetch: Fetch, attempt: Callable[..., T], *arguments: Any) -> T:
    """Calls ``attempt`` until it needs no further stored result, fetching each that it asks for once."""
    while True:
        try:
            return attempt(*arguments)
        except ReferenceNeeded as needed:
            needed.cache[needed.reference.ref] = await fetch(needed.reference)


async def render_async(compiled: Compiled, scope: Mapping[str, Any], fetch: Fetch) -> Any:
    """Renders, fetching stored results as templates touch them."""
    if compiled.constant:
        return compiled.source
    return await with_references(fetch, compiled.render, scope)


async def render_input(compiled: Compiled, scope: Mapping[str, Any], fetch: Fetch) -> dict[str, Any]:
    """Renders an ``input`` block, which may be one template; raises TemplateError if that gives no mapping."""
    values = await render_async(compiled, scope, fetch)
    if isinstance(values, Mapping):
        return dict(values)
    raise TemplateError(
        f"input {shown(compiled.source)} gave {type(values).__name__} {shown(values, 60)}; "
        "it must give a mapping of name to value"
    )
