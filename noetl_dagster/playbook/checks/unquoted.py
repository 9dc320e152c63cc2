"""Finds templates whose values become part of a shell command, of SQL or of a path without being quoted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from jinja2 import TemplateSyntaxError, nodes

from noetl_dagster.errors import Place, Problem, ProblemKind
from noetl_dagster.playbook.checks.templates import place_of_line
from noetl_dagster.playbook.document import Document, texts_in
from noetl_dagster.playbook.models import Playbook, Sink, Task
from noetl_dagster.playbook.templates.reading import Output, outputs_in
from noetl_dagster.playbook.tool_kinds import FOLDER
from noetl_dagster.playbook.wording import is_template


@dataclass(frozen=True, slots=True)
class Language:
    """A language in which the value of a template may be read as more than a value.

    Attributes:
        name: for messages.
        filters: those that quote a value.
        remedy: the fix, with the expression in braces.
        quotes: pairs of quote characters, in which a quoted value is quoted twice.
    """

    name: str
    filters: frozenset[str]
    remedy: str
    quotes: re.Pattern[str] | None = None


_IN_SHELL_QUOTES = re.compile(r"""(?:[^'"#\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|(?<=\S)\#|\#.*)*(['"])?""", re.DOTALL)
_IN_SQL_QUOTES = re.compile(r"""(?:[^'"-]|'[^']*'|"[^"]*"|-(?!-)|--.*)*(['"])?""", re.DOTALL)

SHELL = Language(
    "a shell command",
    frozenset({"shell_quote"}),
    "write {{ EXPRESSION | shell_quote }}, or hand it over with 'env' and write \"$NAME\"",
    _IN_SHELL_QUOTES,
)
SQL = Language(
    "SQL",
    frozenset({"sql_literal", "sql_list", "sql_identifier"}),
    "bind it as :name with 'params', or write {{ EXPRESSION | sql_literal }}, and sql_identifier for a name",
    _IN_SQL_QUOTES,
)
PATH = Language("a path", frozenset({"path_part"}), "write {{ EXPRESSION | path_part }}")

_NUMBERS = frozenset({"int", "float", "length", "count", "round", "abs", "sum", "wordcount"})
_OWN = frozenset({"partition", "keychain", "execution_id"})
"""Names whose values the installation chooses."""

_OF_NAMES = re.compile(r'(?:\b(?:from|into|update|table|join|exists|schema|view|only|on)\s+|[.`"])$', re.IGNORECASE)
"""The end of SQL before the name of a table, or before a part of one."""

_OF_LOOPS = frozenset({"_index", "loop_index", "_attempt", "attempt", "loop", "__frame_max_rows"})
"""Names whose values are numbers."""

_NODES = 1_000
_WARNINGS = 20  # for one text

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash"})


def check_unquoted(playbook: Playbook, document: Document) -> Iterator[Problem]:
    """Yields a warning for each template of a task, a sink or a cursor that is not quoted.

    Left out are constants, numbers, values of the partition and the keychain, and of the workload in paths and in names
    of tables; and paths that are one template, which are bounded when they are rendered.
    """
    wanted: dict[str, Language] = {}
    for step in playbook.steps:
        if step.loop is not None and step.loop.cursor is not None:
            cursor = step.loop.cursor
            wanted |= dict.fromkeys(filter(None, (cursor.claim, cursor.release)), SQL)
        for task in step.tasks:
            wanted |= dict(_texts(task))
    for task in playbook.workbook.values():
        wanted |= dict(_texts(task))
    wanted = {text: language for text, language in wanted.items() if is_template(text)}
    root = document.root
    if not wanted or not isinstance(root, dict):
        return
    workload_names = frozenset(("workload", *playbook.workload))
    lines = playbook.source.splitlines()
    for section in ("workflow", "workbook"):
        for owner, name, label, text in texts_in(root, section):
            if text in wanted:
                yield from _unquoted(text, wanted[text], label, document.place(owner, name), lines, workload_names)


def _texts(task: Task) -> Iterator[tuple[str, Language]]:
    """Yields the texts of a task that are commands, statements or paths."""
    config = task.config
    match task.kind:
        case "shell" | "script":
            yield from ((text, SHELL) for text in _listed(config.get("cmds")))
            yield from ((text, PATH) for text in _listed([config.get(name) for name in FOLDER]))
        case "container":
            command = config.get("command")
            words = _listed(command)
            if isinstance(command, str):
                yield command, SHELL
            elif len(words) > 1 and PurePosixPath(words[0]).name in _SHELLS and words[1].startswith("-"):
                yield from ((text, SHELL) for text in words[2:3])
        case "postgres" | "duckdb" | "ducklake" | "mysql" | "sqlite" | "snowflake" | "bigquery" | "spark":
            yield from ((text, SQL) for text in _listed(config.get("command")))
            yield from ((text, PATH) for text in _listed(config.get("database")) if task.kind in ("duckdb", "sqlite"))
        case "s3" | "gcs":
            places = [config.get(name) for name in ("uri", "key", "source", "destination", "file", "prefix")]
            yield from ((text, PATH) for text in _listed(places))
        case "transfer":
            for end in (config.get("source"), config.get("target")):
                if isinstance(end, Mapping):
                    yield from (
                        (text, SQL) for text in _listed([end.get(name) for name in ("query", "command", "sql")])
                    )
                    names = ("path", "uri", "database") if "request" not in end else ()
                    yield from ((text, PATH) for text in _listed([end.get(name) for name in names]))
    script = config.get("script")
    yield from ((text, PATH) for text in _listed(script.get("uri") if isinstance(script, Mapping) else script))
    for sink in (task.sink, *(rule.sink for rule in task.retry)):
        if sink is not None:
            yield from _texts_of_sink(sink)


def _texts_of_sink(sink: Sink) -> Iterator[tuple[str, Language]]:
    yield from ((text, PATH) for text in (sink.path, sink.database) if text)
    if sink.command:
        yield sink.command, SQL


def _listed(value: Any) -> list[str]:
    values: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
    return [text for text in values if isinstance(text, str)]


def _unquoted(
    text: str, language: Language, label: str, place: Place, lines: list[str], workload_names: frozenset[str]
) -> Iterator[Problem]:
    try:
        outputs = outputs_in(text, command=language is SHELL)
    except TemplateSyntaxError:
        return  # reported as such
    if language is PATH and len(outputs) == 1 and outputs[0].source == text.strip():
        return
    warnings = 0
    for output in outputs:
        if warnings >= _WARNINGS:
            return
        names_table = language is SQL and _OF_NAMES.search(output.before) is not None
        own_names = _OWN | workload_names if language is PATH or names_table else _OWN
        inner = output.source.removeprefix("{{").removesuffix("}}").strip("-+ \n")
        if not _is_quoted(output.expression, output, language, own_names):
            remedy = language.remedy.replace("EXPRESSION", inner)
            message = f"{label}: the value of {output.source} becomes part of {language.name}; {remedy}"
        elif _quotes(output.expression, language) and _is_in_quotes(output.before, language):
            message = f"{label}: {output.source} quotes its value, and stands in quotes; take the quotes away"
        else:
            continue
        warnings += 1
        where = place_of_line(output.line, 1, text, place, lines)
        yield Problem(where, message, "warning", ProblemKind.UNQUOTED_TEMPLATE)


def _is_in_quotes(before: str, language: Language) -> bool:
    quoted = None if language.quotes is None else language.quotes.match(before)
    return quoted is not None and quoted[1] is not None


def _quotes(node: nodes.Node, language: Language) -> bool:
    return isinstance(node, nodes.Filter) and node.name in language.filters


def _is_quoted(node: nodes.Node | None, output: Output, language: Language, untrusted: frozenset[str]) -> bool:
    """Reports whether no value of an expression can be read as more than a value.

    It looks at each bound variable once, and at so many nodes: larger expressions count as unquoted.
    """
    waiting, seen, left = [node], set[str](), _NODES
    while waiting:
        node, left = waiting.pop(), left - 1
        match node:
            case _ if left < 0:
                return False
            case None | nodes.Const() | nodes.TemplateData() | nodes.Compare() | nodes.Not() | nodes.Test():
                pass
            case nodes.Sub() | nodes.Div() | nodes.FloorDiv() | nodes.Pow() | nodes.Neg() | nodes.Pos():
                pass  # numbers, or an error
            case nodes.Filter(name=name) if name in language.filters or name in _NUMBERS:
                pass
            case nodes.Filter(node=inner, args=arguments):
                waiting += [inner, *arguments]
            case nodes.CondExpr(expr1=one, expr2=other) | nodes.BinExpr(left=one, right=other):
                waiting += [one, other]
            case nodes.Concat(nodes=parts) | nodes.List(items=parts) | nodes.Tuple(items=parts):
                waiting += parts
            case nodes.Call(node=nodes.Name(name="range")):
                pass
            case nodes.Call(node=nodes.Getattr(node=inner), args=arguments):  # a method of a value
                waiting += [inner, *arguments]
            case nodes.Getattr(node=inner) | nodes.Getitem(node=inner):
                waiting.append(inner)
            case nodes.Name(name=name) if name in output.bound:
                if name not in seen:
                    seen.add(name)
                    waiting += output.bound[name]
            case nodes.Name(name=name) if name in untrusted or name in _OF_LOOPS:
                pass
            case _:
                return False
    return True
