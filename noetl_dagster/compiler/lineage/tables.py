"""The tables that steps write and the columns of results, found without an SQL parser, which is slow to import."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from noetl_dagster.errors import PlaybookError, TemplateError
from noetl_dagster.events.envelopes import Envelope
from noetl_dagster.playbook.assets import Key
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.playbook.models import Playbook, Step, Task
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.sql.statements import Part, scan, split_statements

SQL_KINDS = frozenset({"postgres", "duckdb", "spark"})
IN_MEMORY = ":memory:"

ROWS_LOOKED_AT = 100
"""Rows that are read for the columns of a result that is a list of mappings."""

_NAME = r'(?P<name>(?:"(?:[^"]|"")+"|`[^`]+`|\w+)(?:\s*\.\s*(?:"(?:[^"]|"")+"|`[^`]+`|\w+)){0,2})'
_INSERT = re.compile(
    rf"\b(?:INSERT\s+(?:OR\s+\w+\s+)?INTO|INSERT\s+OVERWRITE|MERGE\s+INTO)\s+(?:TABLE\s+)?{_NAME}",
    re.IGNORECASE,
)
_CREATE = re.compile(
    rf"^\s*CREATE\s+(?:OR\s+REPLACE\s+)?(?:UNLOGGED\s+)?TABLE\s+(?:IF\s+NOT\s+EXISTS\s+)?{_NAME}"
    r".*?\bAS\s*\(?\s*(?:SELECT|WITH|FROM|VALUES|TABLE)\b",
    re.IGNORECASE | re.DOTALL,
)

_FILLS = re.compile(r"\b(into|overwrite|create)\b|\btable['\"]?\s*:")
"""Matches the lower-case text of playbooks that fill or observe tables."""

MARK = "noetl_value"
"""Replaces templates whose values are known only at run time; names that contain it have no lineage."""

_TEMPLATE = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}", re.DOTALL)
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TEMPLATE_NAME = re.compile(r"(?:workload\.)?([A-Za-z_]\w*)(\s*\|\s*sql_identifier)?")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*){0,2}")
_PART = re.compile(r'"((?:[^"]|"")+)"|`([^`]+)`|([^".`]+)')

_TEMPORARY = re.compile(
    r"^\s*CREATE\s+(?:OR\s+REPLACE\s+)?(?:(?:GLOBAL|LOCAL)\s+)?TEMP(?:ORARY)?\s+TABLE\s+"
    rf"(?:IF\s+NOT\s+EXISTS\s+)?{_NAME}",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """A table, named so that two playbooks name the same table in the same way.

    Attributes:
        kind: ``postgres``, ``duckdb`` or ``spark``.
        where: the credential's name, '' for the default one, or the database's file; None if it is unknown.
        name: as the database compares it, with its schema where the playbook writes that.
    """

    kind: str
    where: str | None
    name: str


Writers = Callable[[WrittenTable], Iterable[Key]]
"""The assets whose steps write a table."""


def tables_written(
    playbook: Playbook, step: Step, workload: Mapping[str, Any] | None = None
) -> tuple[WrittenTable, ...]:
    """Returns the tables that a step fills, by sinks, ``INSERT``, ``MERGE``, ``CREATE TABLE AS`` and ``transfer``.

    Names in templates come from the workload of an execution; default: the playbook's own.
    """
    names = visible(playbook, step, playbook.workload if workload is None else workload)
    tables = (table for task in step.tasks for table in _of_task(playbook, task, without(names, task.input)))
    return tuple(dict.fromkeys(table for table in tables if MARK not in table.name))


def visible(playbook: Playbook, step: Step, workload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the workload as a step's templates see it by bare names."""
    names = without(workload, step.input)
    if step.loop is not None:
        names.pop(step.loop.iterator, None)
    return names


def without(names: Mapping[str, Any], hiding: Any) -> dict[str, Any]:
    """Returns the names without those that a mapping of input hides."""
    hidden = hiding if isinstance(hiding, Mapping) else {}
    return {name: value for name, value in names.items() if name not in hidden}


def place_of(playbook: Playbook, task: Task, names: Mapping[str, Any]) -> str | None:
    """Returns the database of a task's tables, as ``where`` of :class:`WrittenTable`."""
    match task.kind:
        case "spark":
            return ""
        case "duckdb":
            database = rendered_text(task.config.get("database") or IN_MEMORY, names)
            if database is None or MARK in database or database == IN_MEMORY:
                return None
            return str((Path(playbook.file).parent / database).absolute())
    return _credential(task.auth if task.auth is not None else task.config.get("credential"), names)


def has_sql(step: Step) -> bool:
    """Reports whether a task of a step runs SQL from the playbook."""
    return any(task.kind in SQL_KINDS and task.config.get("command") is not None for task in step.tasks)


def sql_of(task: Task, names: Mapping[str, Any]) -> str | None:
    """Returns the SQL of a task as one script; None if it is not in the playbook, or not known yet."""
    if task.kind not in SQL_KINDS or task.config.get("script") is not None:
        return None
    command = task.config.get("command")
    texts = [rendered_text(text, names) for text in (command if isinstance(command, list | tuple) else [command])]
    return None if None in texts else ";\n".join(text for text in texts if text is not None)


def _of_task(playbook: Playbook, task: Task, names: Mapping[str, Any]) -> Iterator[WrittenTable]:
    sql = sql_of(task, names)
    if sql is not None:
        where = place_of(playbook, task, names)
        yield from (WrittenTable(task.kind, where, name) for name in _targets(sql, task.kind))
    for sink in (task.sink, *(rule.sink for rule in task.retry)):
        if sink is not None and sink.tool == "postgres":
            where = _credential(sink.auth, names)
            table = rendered_text(sink.table, names)
            if table:
                yield WrittenTable("postgres", where, table)  # quoted as it is: a sink keeps the case
            command = rendered_text(sink.command, names)
            for name in _targets(command, "postgres") if command is not None else ():
                yield WrittenTable("postgres", where, name)
    target = task.config.get("target") if task.kind == "transfer" else None
    if isinstance(target, Mapping) and (target.get("kind") or target.get("type")) == "postgres":
        table = rendered_text(target.get("table"), names)
        if table:
            auth = target.get("auth", target.get("credential"))
            yield WrittenTable("postgres", _credential(auth, names), table)


def _credential(auth: Any, names: Mapping[str, Any]) -> str | None:
    if auth is None:
        return ""
    text = rendered_text(auth, names)
    return None if text is None or MARK in text else text


def _targets(sql: str, kind: str) -> list[str]:
    """Returns the names of the tables that a script fills."""
    if not re.search("into|overwrite|create", sql, re.IGNORECASE):
        return []
    names: list[str] = []
    temporary: set[str] = set()
    for statement in split_statements(sql):
        words = "".join(_word(part, text) for part, text in scan(statement))
        if (made := _TEMPORARY.match(words)) is not None:
            temporary.add(folded(made["name"], kind))
        matches = [_CREATE.match(words), *_INSERT.finditer(words)]
        names += [folded(match["name"], kind) for match in matches if match is not None]
    return [name for name in names if name not in temporary]


def _word(part: Part, text: str) -> str:
    """Returns a part of SQL without comments, and without the content of text literals."""
    if part is Part.COMMENT:
        return " "
    return text if part is not Part.QUOTED or text.startswith('"') else "''"


class PlaybookWriters:
    """Finds the writers of tables among given playbooks; reads them at the first call."""

    def __init__(self, playbooks: Iterable[Playbook]) -> None:
        self._playbooks = playbooks
        self._found: dict[WrittenTable, list[Key]] | None = None

    def __call__(self, table: WrittenTable) -> Iterable[Key]:
        """Returns the assets whose steps write a table."""
        if self._found is None:
            self._found = {}
            for playbook in self._playbooks:
                for made, key in _made(playbook):
                    self._found.setdefault(made, []).append(key)
        return self._found.get(table, ())


class FolderWriters:
    """Finds the writers of tables in a folder of playbooks, for a run that has loaded only its own.

    A playbook is read when its text has the table's name. The run's own may be outside of the folder.
    """

    def __init__(self, folder: Path, own: Playbook) -> None:
        self._folder = folder
        self._own = PlaybookWriters([own])
        self._made: dict[Path, list[tuple[WrittenTable, Key]]] = {}

    @cached_property
    def _texts(self) -> dict[Path, str]:
        return {path: path.read_text(encoding="utf-8").lower() for path in find_playbooks(self._folder)}

    def __call__(self, table: WrittenTable) -> Iterable[Key]:
        """Returns the assets whose steps write a table."""
        name = table.name.rpartition(".")[2].lower()
        files = [path for path, text in self._texts.items() if name in text and _FILLS.search(text)]
        others = (key for path in files for made, key in self._of(path) if made == table)
        return dict.fromkeys([*self._own(table), *others])

    def _of(self, path: Path) -> list[tuple[WrittenTable, Key]]:
        if path not in self._made:
            try:
                self._made[path] = list(_made(load_playbook(path)))
            except PlaybookError:  # a run of that playbook reports the error
                self._made[path] = []
        return self._made[path]


def _made(playbook: Playbook) -> Iterator[tuple[WrittenTable, Key]]:
    """Yields every table of a playbook's assets: written by their steps, or observed."""
    for step in playbook.steps:
        if step.is_asset:
            yield from ((table, playbook.asset_key(step.name)) for table in tables_written(playbook, step))
    for source in playbook.dagster.observe:
        if source.table is not None:
            where = _credential(source.auth, playbook.workload)
            yield WrittenTable("postgres", where, folded(source.table, "postgres")), source.asset


def rendered_text(text: Any, values: Mapping[str, Any]) -> str | None:
    """Fills templates of known identifiers into a text, and :data:`MARK` into all others.

    Returns None for values that are no text, and for text with template blocks.
    """
    if not isinstance(text, str):
        return None
    if "{" not in text:
        return text
    if "{%" in text:
        return None

    def settled(match: re.Match[str]) -> str:
        name = _TEMPLATE_NAME.fullmatch(match[1])
        value = values.get(name[1]) if name is not None else None
        if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
            return MARK
        try:
            return sql_identifier(value) if name is not None and name[2] else value
        except TemplateError:
            return MARK

    return _TEMPLATE.sub(settled, _COMMENT.sub("", text))


def folded(name: str, kind: str) -> str:
    """Returns a table's name as its database compares it: only PostgreSQL keeps the case of quoted names."""
    parts = []
    for match in _PART.finditer(name):
        quoted = match[1].replace('""', '"') if match[1] is not None else None
        if quoted is not None and kind == "postgres":
            parts.append(quoted)
        else:
            parts.append((quoted or match[2] or match[3]).strip().lower())
    return ".".join(parts)


def columns_of(envelope: Envelope, task: str | None = None) -> Sequence[str] | None:
    """Returns the columns of a step's or a task's result, if they are known or the result is in the log itself."""
    if task is not None:
        results = envelope.get("results")
        result = results.get(task) if isinstance(results, Mapping) else None
        return columns_of(dict(result)) if isinstance(result, Mapping) else None
    reference = envelope.get("ref")
    if reference is not None:
        extra = reference.get("extra") if isinstance(reference, Mapping) else reference.extra
        columns = (extra or {}).get("columns")
        return list(columns) if isinstance(columns, Mapping) and columns else None
    data = envelope.get("data")
    if isinstance(data, Mapping):
        columns = data.get("columns")
        if isinstance(columns, list) and all(isinstance(one, str) for one in columns):
            return columns
        data = data.get("rows")
    if not isinstance(data, list) or not data or not all(isinstance(row, Mapping) for row in data):
        return None
    return list(dict.fromkeys(str(name) for row in data[:ROWS_LOOKED_AT] for name in row))
