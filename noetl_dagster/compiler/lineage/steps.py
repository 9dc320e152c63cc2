"""Column lineage of a step: of its result, or of the table that it fills, down to the assets that it reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from noetl_dagster.compiler.lineage.columns import Columns, TableColumnName, script_of
from noetl_dagster.compiler.lineage.tables import (
    MARK,
    Writers,
    WrittenTable,
    columns_of,
    folded,
    place_of,
    sql_of,
    visible,
    without,
)
from noetl_dagster.events.envelopes import from_result
from noetl_dagster.events.state import ExecutionState, StepEnd
from noetl_dagster.playbook.assets import Key, ReadPartition, call_name
from noetl_dagster.playbook.models import Playbook, Step, Task

AssetColumn = tuple[Key, str]
AssetColumns = dict[str, frozenset[AssetColumn]]
"""The columns of assets that each column was made of."""

# templates that are one name: {{ load }}, {{ load.ref }}, {{ load.rows }}, {{ asset("lake/raw").data.rows }}
_WHOLE = re.compile(
    r"""\{\{-?\s*(?:(?P<name>[A-Za-z_]\w*)
        |asset\(\s*(?P<quote>["'])(?P<key>[^"']+)(?P=quote)
            \s*(?:,\s*(?:partition\s*=\s*)?["'](?P<partition>[^"']+)["']\s*)?\))
        (?:\.(?:ref|rows|data|data\.rows))?\s*-?\}\}""",
    re.VERBOSE,
)
_ADDRESS = re.compile(r"([A-Za-z_]\w*)(?:\.(?:rows|data|data\.rows))?")


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


def column_lineage(
    playbook: Playbook, step: Step, end: StepEnd, state: ExecutionState, writers: Writers
) -> AssetColumns:
    """Returns the source columns of the asset of a step that has ended; columns with unknown sources are left out.

    They are those of the one table that the step fills, and of its result.
    """
    reader = _StepReader(playbook, end, state, writers)
    done = reader.done(step)
    tables = list(done.tables.values())
    lineage = {**reader.result(step, done), **(tables[0] if len(tables) == 1 else {})}
    return {column: sources for column, sources in lineage.items() if sources}


class _StepReader:
    def __init__(self, playbook: Playbook, end: StepEnd, state: ExecutionState, writers: Writers) -> None:
        self._playbook = playbook
        self._end = end
        self._state = state
        self._writers = writers
        self._names = {step.name for step in playbook.steps}
        self._open: list[str] = []  # steps that are being read: results may pass in circles

    def result(self, step: Step, done: _Done) -> AssetColumns:
        if not step.tasks or step.output is not None:
            return {}
        return done.results.get(step.tasks[-1].name) or {}

    def done(self, step: Step) -> _Done:
        done = _Done()
        for task in step.tasks:
            self._read(step, task, done)
        return done

    def _read(self, step: Step, task: Task, done: _Done) -> None:
        names = without(visible(self._playbook, step, self._state.workload), task.input)
        names = without(names, self._state.ctx)  # which gives its names another meaning
        sql = sql_of(task, names)
        done.results[task.name] = None
        if sql is None:
            return
        views = {} if task.kind == "postgres" else self._views(step, task, done)
        columns_by_table = {name: view.columns for name, view in views.items() if view.columns is not None}
        rows = None
        if len(step.tasks) > 1:
            rows = self._result_columns(step.name, task.name)
        elif step.output is None:
            rows = self._result_columns(step.name)
        script = script_of(sql, task.kind, columns_by_table, rows)
        where = place_of(self._playbook, task, names)
        own = self._playbook.asset_key(step.name)

        def sources(column: TableColumnName) -> Iterable[AssetColumn]:
            table, name = column
            if table in views:
                return views[table].sources(name)
            writers = () if where is None else self._writers(WrittenTable(task.kind, where, table))
            return [(key, name) for key in writers if key != own]

        def resolved(columns: Columns) -> AssetColumns:
            return {name: frozenset(chain.from_iterable(map(sources, named))) for name, named in columns.items()}

        if script.result is not None and task.output is None:
            done.results[task.name] = resolved(script.result)
        for name, columns in script.tables.items():
            if MARK not in name:
                done.tables[name] = resolved(columns)

    def _result_columns(self, step: str, task: str | None = None) -> Sequence[str] | None:
        """Returns the columns of the result of a step, or of one of its tasks, if they are known."""
        end = self._end if step == self._end.step else self._state.latest.get(step)
        return None if end is None else columns_of(end.envelope, task)

    def _views(self, step: Step, task: Task, done: _Done) -> dict[str, _Named]:
        """Returns the tables of a call that are results, by name. Other names have no lineage."""
        views: dict[str, _Named | None] = {}
        addresses = {
            **(step.input if isinstance(step.input, Mapping) else {}),
            **(task.input if isinstance(task.input, Mapping) else {}),
        }
        for name, value in addresses.items():
            match = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
            if match is None:
                views[name] = None
            elif match["key"] is not None:
                partition = match["partition"] or ReadPartition.SAME
                views[name] = self._source(step, call_name(match["key"], partition))
            else:
                views[name] = self._named(step, task, match["name"], done)
        for name, address in _addresses(task).items():
            whole = _ADDRESS.fullmatch(address)
            views[name] = None if whole is None else self._named(step, task, whole[1], done)
        unknown = _Named(None)
        return {folded(name, task.kind): unknown if one is None else one for name, one in views.items()}

    def _named(self, step: Step, task: Task, name: str, done: _Done) -> _Named | None:
        """Returns the meaning of a template's bare name, in the order in which templates resolve names."""
        if name in done.results and name != task.name:
            return _Named(self._result_columns(step.name, name), made=done.results[name] or {})
        looping = step.loop is not None and name == step.loop.iterator
        shadowed = isinstance(step.input, Mapping) and name in step.input
        if looping or shadowed or name in self._state.ctx or name in self._state.workload:
            return None
        return self._source(step, name) or self._step(name)

    def _source(self, step: Step, name: str) -> _Named | None:
        source = step.sources.get(name)
        if source is None:
            return None
        visit = self._end.visit if step.name == self._end.step else 1
        read = self._state.reads.get((step.name, visit), {}).get(name) or {}
        columns = columns_of(from_result(read["result"])) if "result" in read else None
        return _Named(columns, asset=self._playbook.key_of(source.asset))

    def _step(self, name: str) -> _Named | None:
        if name not in self._names:
            return None
        step = self._playbook.step(name)
        columns = self._result_columns(name)
        if step.is_asset:
            return _Named(columns, asset=self._playbook.asset_key(name))
        if name in self._open:
            return None
        self._open.append(name)  # no asset: lineage passes through
        try:
            return _Named(columns, made=self.result(step, self.done(step)))
        finally:
            self._open.pop()


def _addresses(task: Task) -> dict[str, str]:
    """Returns the inputs of a spark task by name, as its ``from`` addresses them."""
    addresses = (task.config.get("from") or {}) if task.kind == "spark" else {}
    if isinstance(addresses, Mapping):
        return {str(name): str(address) for name, address in addresses.items()}
    return {str(name): str(name) for name in ([addresses] if isinstance(addresses, str) else addresses)}
