"""TableColumnName lineage of a step: of its result, or of the table that it fills, down to the assets that it reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from noetl_dagster.compiler.lineage.columns import Columns, TableColumnName, script_of
from noetl_dagster.compiler.lineage.tables import (
    MARK,
    Writers,
    WrittenTable,
    folded,
    no_writers,
    place_of,
    sql_of,
    visible,
    without,
)
from noetl_dagster.playbook.assets import Key, ReadPartition, call_name
from noetl_dagster.playbook.models import Playbook, Step, Task

AssetColumn = tuple[Key, str]
AssetColumns = dict[str, frozenset[AssetColumn]]
"""The columns of assets that each column was made of."""

# what a template names, as a whole: {{ load }}, {{ load.ref }}, {{ load.rows }}, {{ asset("lake/raw").data.rows }}
_WHOLE = re.compile(
    r"""\{\{-?\s*(?:(?P<name>[A-Za-z_]\w*)
        |asset\(\s*(?P<quote>["'])(?P<key>[^"']+)(?P=quote)
            \s*(?:,\s*(?:partition\s*=\s*)?["'](?P<partition>[^"']+)["']\s*)?\))
        (?:\.(?:ref|rows|data|data\.rows))?\s*-?\}\}""",
    re.VERBOSE,
)
_ADDRESS = re.compile(r"([A-Za-z_]\w*)(?:\.(?:rows|data|data\.rows))?")


def _nothing(*names: str) -> Sequence[str] | None:
    return None


@dataclass(frozen=True, slots=True)
class KnownColumns:
    """Facts of an execution that the playbook does not contain.

    Attributes:
        workload: its own.
        hidden: names that ``ctx`` gives another meaning.
        result_columns: columns of the result of a step, or of one of its tasks, where they are known.
        read_columns: of what a step reads of another asset, by step and name.
        writers: see :data:`noetl_dagster.compiler.lineage.tables.Writers`.
    """

    workload: Mapping[str, Any]
    hidden: frozenset[str] = frozenset()
    result_columns: Callable[..., Sequence[str] | None] = _nothing
    read_columns: Callable[[str, str], Sequence[str] | None] = _nothing
    writers: Writers = no_writers


@dataclass(frozen=True, slots=True)
class _Named:
    """The meaning of a name in SQL: an asset, or intermediate rows whose columns come from those of assets."""

    columns: Sequence[str] | None
    asset: Key | None = None
    made: AssetColumns = field(default_factory=dict)

    def sources(self, column: str) -> frozenset[AssetColumn]:
        if self.asset is not None:
            return frozenset({(self.asset, column)})
        return self.made.get(column, frozenset())


@dataclass(slots=True)
class _Done:
    """The lineage of the step's tasks so far."""

    results: dict[str, AssetColumns | None] = field(default_factory=dict)
    tables: dict[str, AssetColumns] = field(default_factory=dict)


def column_lineage(playbook: Playbook, step: Step, seen: KnownColumns) -> AssetColumns:
    """Returns the source columns of a step's asset; columns with unknown sources are left out."""
    found = _StepReader(playbook, seen).asset_columns(step)
    return {column: sources for column, sources in found.items() if sources}


class _StepReader:
    def __init__(self, playbook: Playbook, seen: KnownColumns) -> None:
        self._playbook = playbook
        self._seen = seen
        self._names = {step.name for step in playbook.steps}
        self._open: list[str] = []  # steps that are being read: results may pass in circles

    def asset_columns(self, step: Step) -> AssetColumns:
        """Returns the columns of the one table that a step fills, and of its result."""
        done = self._done(step)
        tables = list(done.tables.values())
        return {**self._result(step, done), **(tables[0] if len(tables) == 1 else {})}

    def _result(self, step: Step, done: _Done) -> AssetColumns:
        if not step.tasks or step.output is not None:
            return {}
        return done.results.get(step.tasks[-1].name) or {}

    def _done(self, step: Step) -> _Done:
        done = _Done()
        for task in step.tasks:
            self._read(step, task, done)
        return done

    def _read(self, step: Step, task: Task, done: _Done) -> None:
        names = {
            name: value
            for name, value in without(visible(self._playbook, step, self._seen.workload), task.input).items()
            if name not in self._seen.hidden
        }
        sql = sql_of(task, names)
        done.results[task.name] = None
        if sql is None:
            return
        views = {} if task.kind == "postgres" else self._views(step, task, done)
        known = {name: view.columns for name, view in views.items() if view.columns is not None}
        rows = self._columns_of(step, task)
        script = script_of(sql, task.kind, known, rows)
        where = place_of(self._playbook, task, names)

        def resolved(columns: Columns) -> AssetColumns:
            return {
                name: frozenset(chain.from_iterable(map(source, found))) for name, found in columns.items()
            }

        def source(column: TableColumnName) -> Iterable[AssetColumn]:
            return self._sources(step, task, views, where, *column)

        if script.result is not None and task.output is None:
            done.results[task.name] = resolved(script.result)
        for name, columns in script.tables.items():
            if MARK not in name:
                done.tables[name] = resolved(columns)

    def _columns_of(self, step: Step, task: Task) -> Sequence[str] | None:
        if len(step.tasks) > 1:
            return self._seen.result_columns(step.name, task.name)
        return None if step.output is not None else self._seen.result_columns(step.name)

    def _sources(
        self, step: Step, task: Task, views: Mapping[str, _Named], where: str | None, table: str, column: str
    ) -> Iterable[AssetColumn]:
        if table in views:
            return views[table].sources(column)
        if where is None:
            return ()
        own = self._playbook.asset_key(step.name)
        writers = self._seen.writers(WrittenTable(task.kind, where, table))
        return [(key, column) for key in writers if key != own]

    # -- names ---------------------------------------------------------------------------------------

    def _views(self, step: Step, task: Task, done: _Done) -> dict[str, _Named]:
        """Returns the tables of a call that are results, by name. Other names have no lineage."""
        found: dict[str, _Named | None] = {}
        given = {
            **(step.input if isinstance(step.input, Mapping) else {}),
            **(task.input if isinstance(task.input, Mapping) else {}),
        }
        for name, value in given.items():
            match = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
            if match is None:
                found[name] = None
            elif match["key"] is not None:
                found[name] = self._source(
                    step, call_name(match["key"], match["partition"] or ReadPartition.SAME)
                )
            else:
                found[name] = self._named(step, task, match["name"], done)
        for name, address in _addresses(task).items():
            whole = _ADDRESS.fullmatch(address)
            found[name] = None if whole is None else self._named(step, task, whole[1], done)
        unknown = _Named(None)
        return {folded(name, task.kind): unknown if one is None else one for name, one in found.items()}

    def _named(self, step: Step, task: Task, name: str, done: _Done) -> _Named | None:
        """Returns the meaning of a template's bare name, in the order in which templates resolve names."""
        if name in done.results and name != task.name:
            return _Named(self._seen.result_columns(step.name, name), made=done.results[name] or {})
        looping = step.loop is not None and name == step.loop.iterator
        shadowed = isinstance(step.input, Mapping) and name in step.input
        if looping or shadowed or name in self._seen.hidden or name in self._seen.workload:
            return None
        return self._source(step, name) or self._step(name)

    def _source(self, step: Step, name: str) -> _Named | None:
        source = step.sources.get(name)
        if source is None:
            return None
        return _Named(self._seen.read_columns(step.name, name), asset=self._playbook.key_of(source.asset))

    def _step(self, name: str) -> _Named | None:
        if name not in self._names:
            return None
        step = self._playbook.step(name)
        columns = self._seen.result_columns(name)
        if step.is_asset:
            return _Named(columns, asset=self._playbook.asset_key(name))
        if name in self._open:
            return None
        self._open.append(name)  # no asset: lineage passes through
        try:
            return _Named(columns, made=self._result(step, self._done(step)))
        finally:
            self._open.pop()


def _addresses(task: Task) -> dict[str, str]:
    """``from`` of a spark task: the name of each input, and what it names."""
    given = (task.config.get("from") or {}) if task.kind == "spark" else {}
    if isinstance(given, Mapping):
        return {str(name): str(address) for name, address in given.items()}
    return {str(name): str(name) for name in ([given] if isinstance(given, str) else given)}


__all__ = ["AssetColumns", "KnownColumns", "column_lineage"]
