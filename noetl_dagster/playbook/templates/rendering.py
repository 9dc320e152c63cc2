"""The one place that renders templates: strings, lists and mappings of a playbook against a scope.

A string that is exactly one expression keeps the type of its value; any other renders to text.
Sources are parsed once per process and compiled to Python on their first rendering, so ten thousand
iterations of a loop pay once.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jinja2 import TemplateSyntaxError, Undefined, UndefinedError, nodes

from noetl_dagster.errors import NoetlError, TemplateError, UndefinedNameError
from noetl_dagster.playbook.templates.compiling import undeclared_names
from noetl_dagster.playbook.templates.environment import PlaybookEnvironment, ScopeContext, UnknownName
from noetl_dagster.playbook.templates.views import (
    LazyMapping,
    ReferenceNeeded,
    View,
    grown,
    is_lazy_sequence,
    plain,
)
from noetl_dagster.playbook.wording import did_you_mean, listed

if TYPE_CHECKING:
    from noetl_dagster.result_ref import ResultRef

Fetch = Callable[["ResultRef"], Awaitable[Any]]
T = TypeVar("T")

ENVIRONMENT = PlaybookEnvironment()
CACHED_TEMPLATES = 16_384
_FALSE_TEXTS = frozenset({"false", "0", "no", "none", ""})
# braces of other languages that can never be Jinja are left as they are: Go templates
# (docker --format '{{.Names}}'), ${#array} of shells, array literals of PostgreSQL ('{{1,2},{3,4}}')
_FOREIGN = re.compile(r"\{\{-?\s*\.[^{}]*\}\}|\$\{#[^{}]*\}|\{\{[-\w\s,.]*\}(?!\})")
_GO_BLOCK = re.compile(r"\{\{-?\s*(?:range|if|with)\s[^{}]*\}\}")
_GO_WORD = re.compile(r"\{\{-?\s*(?:(?:range|if|with)\s[^{}]*|else|end)\s*-?\}\}")
_PATH = re.compile(r"\s*\{\{\s*([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*\s*\}\}\s*\Z", re.ASCII)
_WORDS = frozenset({"true", "false", "none", "not", "and", "or", "in", "is", "if", "else"})
_RAW = r"{% raw %}\g<0>{% endraw %}"
_RESULT = "__result__"
_SHOWN_NAMES = 30
_FEW = 64
"""Parts of a text that need no bound together."""
_SHOWN_BEFORE = 1_000
_NO_NAMES: frozenset[str] = frozenset()


class Compiled:
    """A value of a playbook, ready to be rendered any number of times: itself if it holds no template at all.

    Attributes:
        source: the value as it stands in the playbook.
        constant: whether it holds no template; then ``render`` ignores its scope.
        names: the root names that its templates use.
        is_expression: whether it is exactly one ``{{ expression }}``, which keeps its type.
        is_fresh: whether ``render`` gives a value that nothing else holds, so that it need not be copied.
    """

    constant = True
    is_expression = False
    is_fresh = False

    __slots__ = ("names", "source")

    def __init__(self, source: Any, names: frozenset[str] = _NO_NAMES) -> None:
        self.source = source
        self.names = names

    def render(self, scope: Mapping[str, Any]) -> Any:
        """Returns the value in ``scope``, without views. It may be part of the scope: change only a copy (``plain``).

        Raises:
            UndefinedNameError: a name is not known in the scope.
            TemplateError: anything else that goes wrong inside a template.
            ReferenceNeeded: a stored result has to be fetched first; see :func:`render_async`.
        """
        return self.source

    def render_over(self, scope: Mapping[str, Any], before: Any) -> Any:
        """Renders a copy that reuses the unchanged parts of ``before`` (``grown``)."""
        return grown(self.render(scope), before)

    def evaluate(self, scope: Mapping[str, Any]) -> Any:
        """Renders like ``render``, but views stay views and an unknown name is returned as a false object."""
        return self.render(scope)

    def holds(self, scope: Mapping[str, Any]) -> bool:
        """Reports whether it is true in ``scope``, as the condition of a ``when``.

        Raises:
            UndefinedNameError: an unknown name is compared, printed or computed with; testing its
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


class _Template(Compiled):
    """Common part of expression and text: compiled to Python on first use, errors in domain terms."""

    constant = False

    __slots__ = ("_function",)

    def __init__(self, source: str, names: frozenset[str]) -> None:
        super().__init__(source, names)
        self._function: Callable[[ScopeContext], Any] | None = None

    def _tree(self) -> nodes.Template:
        """Parses again, since a playbook of thousands of templates should not keep a tree for each."""
        return _parse(self.source)

    def _compiled(self) -> Callable[[ScopeContext], Any]:
        if self._function is None:
            try:
                self._function = ENVIRONMENT.function(self._tree())
            except TemplateSyntaxError as error:
                raise _syntax_error(self.source, error) from None
        return self._function

    def _failed(self, error: Exception, scope: Mapping[str, Any]) -> NoetlError:
        if isinstance(error, UndefinedError):
            known = _known_names(scope, self.names)
            return UndefinedNameError(f"{shown(self.source)}: {error.message}; {known}")
        return TemplateError(f"{shown(self.source)}: {type(error).__name__}: {error}")


class _Expression(_Template):
    """Exactly one ``{{ expression }}``: keeps the type of its value."""

    is_expression = True

    __slots__ = ("is_fresh",)

    def __init__(self, source: str, names: frozenset[str], *, may_build: bool) -> None:
        super().__init__(source, names)
        # a bare path leads to data as stored; only built values can hold views deep inside
        self.is_fresh = may_build

    def _tree(self) -> nodes.Template:
        """Builds ``{% set __result__ = expression %}``: the value is read from the context, never made text."""
        expression = _whole_expression(_parse(self.source))
        assert expression is not None
        assign = nodes.Assign(nodes.Name(_RESULT, "store"), expression, lineno=1)
        tree = nodes.Template([assign], lineno=1)
        tree.set_environment(ENVIRONMENT)
        return tree

    def evaluate(self, scope: Mapping[str, Any]) -> Any:
        function = self._function or self._compiled()
        context = ScopeContext(ENVIRONMENT, scope)
        try:
            for _ in function(context):
                pass
        except (NoetlError, ReferenceNeeded):
            raise
        except Exception as error:
            raise self._failed(error, scope) from error
        return context.vars[_RESULT]

    def render_over(self, scope: Mapping[str, Any], before: Any) -> Any:
        return grown(self._defined(scope), before)

    def render(self, scope: Mapping[str, Any]) -> Any:
        value = self._defined(scope)
        try:
            return self._plain(value)
        except (NoetlError, ReferenceNeeded):
            raise
        except RecursionError:
            raise TemplateError(f"{shown(self.source)}: its value is nested too deep") from None
        except Exception as error:  # filters such as map work when their items are read
            raise self._failed(error, scope) from error

    def _plain(self, value: Any) -> Any:
        if isinstance(value, (View, LazyMapping)) or is_lazy_sequence(value):
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


class _Text(_Template):
    """Text with templates in it."""

    __slots__ = ()

    def render(self, scope: Mapping[str, Any]) -> str:
        function = self._function or self._compiled()
        try:
            parts = list(function(context := ScopeContext(ENVIRONMENT, scope)))
            if len(parts) > _FEW:
                context.charge(sum(map(len, parts)))
            return "".join(parts)
        except (NoetlError, ReferenceNeeded):
            raise
        except Exception as error:
            raise self._failed(error, scope) from error


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


def compile_value(value: Any) -> Compiled:
    """Compiles strings, also inside lists and mappings; raises TemplateError if one does not parse."""
    if isinstance(value, str):
        return _compile_text(value)
    if isinstance(value, Mapping):
        pairs = [(compile_value(key), compile_value(item)) for key, item in value.items()]
        constant = all(key.constant and item.constant for key, item in pairs)
        return Compiled(value) if constant else _Mapping(value, pairs)
    if isinstance(value, (list, tuple)):
        items = [compile_value(item) for item in value]
        return Compiled(value) if all(item.constant for item in items) else _List(list(value), items)
    return Compiled(value)


@lru_cache(maxsize=CACHED_TEMPLATES)
def _compile_text(source: str) -> Compiled:
    if "{{" not in source and "{%" not in source and "{#" not in source:
        return Compiled(source)
    path = _PATH.match(source)
    if path is not None and path[1].lower() not in _WORDS:  # most templates: nothing to parse before use
        return _Expression(source, frozenset((path[1],)) - ENVIRONMENT.globals.keys(), may_build=False)
    try:
        tree = _parse(source)
        names = _names(tree) - ENVIRONMENT.globals.keys()
    except TemplateSyntaxError as error:
        raise _syntax_error(source, error) from None
    expression = _whole_expression(tree)
    if expression is None:
        return _Text(source, names)
    return _Expression(source, names, may_build=not _is_path(expression))


def _parse(source: str) -> nodes.Template:
    text = source.strip()
    is_whole = text.startswith("{{") and text.endswith("}}")  # else white space belongs to the text
    return ENVIRONMENT.parse(_marked(text if is_whole else source))


def _marked(text: str) -> str:
    """Marks braces of other languages as text."""
    text = _FOREIGN.sub(_RAW, text)
    return _GO_WORD.sub(_RAW, text) if _GO_BLOCK.search(text) else text


class Output(NamedTuple):
    """An expression whose value becomes part of a text.

    Attributes:
        source: the expression with its braces.
        line: of the text, from 1.
        before: the text before it in its line, without other templates; of a long line the last 1,000 characters.
        bound: expressions of variables that the text binds, by name.
    """

    source: str
    line: int
    before: str
    expression: nodes.Expr
    bound: Mapping[str, list[nodes.Node]]


def outputs_in(source: str) -> list[Output]:
    """Returns the expressions that a text renders, in their order.

    Raises:
        TemplateSyntaxError: it does not parse.
    """
    found: list[Output] = []
    before, inside = "", ""
    marked, bound = _marked(source), dict[str, list[nodes.Node]]()
    for node in ENVIRONMENT.parse(marked).find_all((nodes.Assign, nodes.For)):
        match node:
            case (
                nodes.Assign(target=nodes.Name(name=name), node=value)
                | nodes.For(target=nodes.Name(name=name), iter=value)
            ):
                bound.setdefault(name, []).append(value)
    for line, token, text in ENVIRONMENT.lex(marked):
        if token == "variable_begin" or inside:
            inside += text
        elif token == "data":
            before = (before + text).rpartition("\n")[2][-_SHOWN_BEFORE:]
        if token == "variable_end":
            expression = _whole_expression(ENVIRONMENT.parse(inside))
            if expression is not None:
                start = line - inside.count("\n")
                found.append(Output(inside.strip(), start, before, expression, bound))
            inside = ""
    return found


_LENIENT = frozenset({"default", "d", "defined", "undefined"})
"""Filters and tests of what may be missing."""


def paths_in(source: str) -> frozenset[tuple[str, ...]]:
    """Returns the paths that templates of a text read, such as ``("event", "payload", "row_count")``.

    Paths that may be undefined, as in ``path | default(0)``, are left out.

    Raises:
        TemplateSyntaxError: it does not parse.
    """
    found: set[tuple[str, ...]] = set()
    waiting: list[nodes.Node] = [_parse(source)]
    while waiting:
        node = waiting.pop()
        path = _path_of(node)
        if path is not None:
            found.add(path)
        elif not (isinstance(node, nodes.Filter | nodes.Test) and node.name in _LENIENT):
            waiting.extend(node.iter_child_nodes())
    return frozenset(found)


def _path_of(node: nodes.Node) -> tuple[str, ...] | None:
    path: list[str] = []
    while not isinstance(node, nodes.Name):
        if isinstance(node, nodes.Getattr):
            path.append(node.attr)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            path.append(node.arg.value)
        else:
            return None
        node = node.node
    return (node.name, *reversed(path))


def _whole_expression(tree: nodes.Template) -> nodes.Expr | None:
    match tree.body:
        case [nodes.Output(nodes=[expression])] if not isinstance(expression, nodes.TemplateData):
            return expression
    return None


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


def _syntax_error(source: str, error: TemplateSyntaxError) -> TemplateError:
    line = f", line {error.lineno} of the text" if source.count("\n") else ""
    return TemplateError(f"template {shown(source)} does not parse{line}: {error.message}")


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
    if isinstance(value, View):
        value = value.plain()
    if isinstance(value, str):
        return value.strip().lower() not in _FALSE_TEXTS
    return bool(value)


def condition(value: str | bool | None) -> Compiled:
    """Compiles a ``when``: None holds always, a boolean is taken as it is."""
    return compile_value(True if value is None else value)


async def with_references(attempt: Callable[[], T], fetch: Fetch) -> T:
    """Calls ``attempt`` until it needs no further stored result, fetching each that it asks for once."""
    while True:
        try:
            return attempt()
        except ReferenceNeeded as needed:
            needed.cache[needed.reference.ref] = await fetch(needed.reference)


async def render_async(compiled: Compiled, scope: Mapping[str, Any], fetch: Fetch) -> Any:
    """Renders, fetching stored results as templates touch them."""
    if compiled.constant:
        return compiled.source
    return await with_references(lambda: compiled.render(scope), fetch)


async def render_input(compiled: Compiled, scope: Mapping[str, Any], fetch: Fetch) -> dict[str, Any]:
    """Renders an ``input`` block, which may be one template; raises TemplateError if that gives no mapping."""
    values = await render_async(compiled, scope, fetch)
    if isinstance(values, Mapping):
        return dict(values)
    raise TemplateError(
        f"input {shown(compiled.source)} gave {type(values).__name__} {shown(values, 60)}; "
        "it must give a mapping of name to value"
    )


async def holds_async(condition: Compiled, scope: Mapping[str, Any], fetch: Fetch) -> bool:
    """Reports whether ``condition`` holds, fetching stored results as it touches them."""
    return await with_references(lambda: condition.holds(scope), fetch)
