"""The source columns of SQL columns, by sqlglot: for statements that select, insert and create."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import sqlglot
from sqlglot import exp
from sqlglot.lineage import Node, to_node
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers
from sqlglot.optimizer.qualify import qualify
from sqlglot.optimizer.scope import build_scope, traverse_scope
from sqlglot.schema import MappingSchema

from noetl_dagster.compiler.lineage.tables import MARK

logging.getLogger("sqlglot").setLevel(logging.CRITICAL)  # SQL that it cannot read has no lineage

TableColumnName = tuple[str, str]
"""A table's name, as its database compares it, and one of its columns."""

Columns = dict[str, frozenset[TableColumnName]]
"""The source columns of each column."""

LONGEST = 100_000
"""Longer scripts, in characters, are not read: they are data rather than queries."""


@dataclass(slots=True)
class Script:
    """The lineage of a script's statements.

    Attributes:
        result: of the rows of its last statement that selects; None if there is none, or if it is unknown.
        tables: of each table that it fills, by name.
    """

    result: Columns | None = None
    tables: dict[str, Columns] = field(default_factory=dict)


def script_of(
    sql: str, dialect: str, columns_by_table: Mapping[str, Sequence[str]], result: Sequence[str] | None = None
) -> Script:
    """Returns the certain lineage of a script; an empty ``Script`` if sqlglot cannot read it.

    Args:
        dialect: ``postgres``, ``duckdb`` or ``spark``.
        columns_by_table: columns of the tables and views, as far as they are known.
        result: the columns that the script's rows turned out to have.
    """
    if len(sql) > LONGEST:
        return Script()
    tables = tuple(sorted((name, tuple(columns)) for name, columns in columns_by_table.items()))
    return _script(sql, dialect, tables, None if result is None else tuple(result))


@lru_cache(maxsize=256)
def _script(
    sql: str, dialect: str, columns_by_table: tuple[tuple[str, tuple[str, ...]], ...], result: tuple[str, ...] | None
) -> Script:
    try:
        statements = [one for one in sqlglot.parse(sql, read=dialect) if one is not None]
    except Exception:  # whatever the parser raises must not fail the step
        return Script()
    reader = _ScriptReader(dialect, dict(columns_by_table))
    selecting = [one for one in statements if isinstance(one, exp.Query)]
    for statement in statements:
        rows = result if selecting and statement is selecting[-1] else None
        try:
            reader.read(statement, rows)
        except Exception:
            reader.forget(statement)
    return reader.script


class _Unknown(Exception):
    """The lineage cannot be determined."""


@dataclass(frozen=True, slots=True)
class _Selected:
    """Columns of a query.

    Attributes:
        whole: these are all; a star of an unknown table stands for more.
        placed: they have the query's order. Those of a star do not: the columns of a table may be known, but not their
            order.
    """

    columns: list[tuple[str, frozenset[TableColumnName]]]
    whole: bool
    placed: bool


class _ScriptReader:
    """Reads one statement after another; tables that the script itself makes are resolved to their sources."""

    def __init__(self, dialect: str, columns_by_table: dict[str, tuple[str, ...]]) -> None:
        self.script = Script()
        self._dialect = dialect
        self._columns_by_table = columns_by_table
        self._made: dict[str, Columns] = {}
        self._passing: set[str] = set()  # views and temporary tables

    def read(self, statement: exp.Expr, rows: Sequence[str] | None) -> None:
        match statement:
            case exp.Query():
                self.script.result = None
                self.script.result = _named(self._query(statement, rows), rows)
            case exp.Insert():
                self._insert(statement)
            case exp.Create() if statement.kind in ("TABLE", "VIEW"):
                self._create(statement)
            case exp.Drop() | exp.TruncateTable():
                for table in statement.find_all(exp.Table):
                    self._made.pop(_name_of(normalize_identifiers(table.copy(), dialect=self._dialect)), None)

    def forget(self, statement: exp.Expr) -> None:
        """Marks the result of a statement that cannot be read as unknown."""
        if isinstance(statement, exp.Query):
            self.script.result = None
        elif isinstance(statement, exp.Insert | exp.Create):
            self._set(self._target(statement)[0], {})

    def _insert(self, statement: exp.Insert) -> None:
        name, columns = self._target(statement)
        query = statement.expression
        if not isinstance(query, exp.Query):
            return  # VALUES: no source columns
        query = query.copy()
        if (above := statement.args.get("with_") or statement.args.get("with")) is not None:
            query.set("with_" if "with_" in statement.arg_types else "with", above.copy())
        selected = self._query(query, None)
        if statement.args.get("by_name"):
            filled = dict(selected.columns)
        else:
            columns = columns or self._columns_by_table.get(name, ())
            if not selected.placed or len(columns) < len(selected.columns):
                raise _Unknown
            filled = dict(zip(columns, (sources for _, sources in selected.columns), strict=False))
        self._fill(name, filled)

    def _create(self, statement: exp.Create) -> None:
        name, columns = self._target(statement)
        if not isinstance(statement.expression, exp.Query):
            if columns and not statement.args.get("exists"):
                self._columns_by_table[name] = columns
            return
        properties = statement.args.get("properties")
        if statement.kind != "TABLE" or (properties and properties.find(exp.TemporaryProperty)):
            self._passing.add(name)
        selected = self._query(statement.expression.copy(), None)
        if columns and (not selected.placed or len(columns) != len(selected.columns)):
            raise _Unknown
        names = columns or tuple(name for name, _ in selected.columns)
        filled = dict(zip(names, (sources for _, sources in selected.columns), strict=True))
        if statement.args.get("replace"):
            self._made.pop(name, None)
        self._fill(name, filled)
        if selected.whole:
            self._columns_by_table[name] = tuple(filled)

    def _fill(self, name: str, columns: Columns) -> None:
        filled = dict(self._made.get(name, {}))
        for column, sources in columns.items():
            filled[column] = filled.get(column, frozenset()) | sources
        self._set(name, filled)

    def _set(self, name: str, columns: Columns) -> None:
        self._made[name] = columns
        if name not in self._passing:
            self.script.tables[name] = columns

    def _target(self, statement: exp.Expr) -> tuple[str, tuple[str, ...]]:
        """Returns the name and the columns of the table that a statement fills."""
        target = normalize_identifiers(statement.this.copy(), dialect=self._dialect)
        columns: tuple[str, ...] = ()
        if isinstance(target, exp.Schema):
            columns = tuple(one.name for one in target.expressions if isinstance(one, exp.Identifier | exp.ColumnDef))
            target = target.this
        if not isinstance(target, exp.Table):
            raise _Unknown
        return _name_of(target), columns

    def _query(self, query: exp.Query, rows: Sequence[str] | None) -> _Selected:
        return _QueryReader(query, self._dialect, self._columns_by_table, self._made, rows).selected()


class _QueryReader:
    """The columns of one query.

    Tables get plain names first, so that schemas, quotes and catalogs make no difference to sqlglot.

    Args:
        rows: the columns that the query's rows turned out to have.
    """

    def __init__(
        self,
        query: exp.Query,
        dialect: str,
        columns_by_table: Mapping[str, tuple[str, ...]],
        made: Mapping[str, Columns],
        rows: Sequence[str] | None,
    ) -> None:
        self._dialect = dialect
        self._made = made
        self._query = normalize_identifiers(query.copy(), dialect=dialect)
        self._tables = self._renamed()
        self._placed = not self._query.is_star
        self._check_places()
        columns = {own: columns_by_table[name] for own, name in self._tables.items() if name in columns_by_table}
        self._spelled = {own: {self._folded(one): one for one in names} for own, names in columns.items()}
        only = self._only_star()
        if only is not None and only not in columns and rows:  # then its columns are those of the rows
            self._spelled[only] = {self._folded(one): one for one in rows}

    def selected(self) -> _Selected:
        schema = MappingSchema(
            {own: dict.fromkeys(names, "TEXT") for own, names in self._spelled.items()},
            dialect=self._dialect,
            normalize=False,
        )
        query = qualify(
            self._query,
            dialect=self._dialect,
            schema=schema,
            validate_qualify_columns=False,
            allow_partial_qualification=True,
            expand_alias_refs=self._dialect != "postgres",  # where a select list cannot use its own aliases
            identify=False,
        )
        scope = build_scope(query)
        if scope is None or not isinstance(query, exp.Query):
            raise _Unknown
        columns = []
        for place, select in enumerate(query.selects):
            if not select.is_star:
                name = select.alias_or_name
                at = place if self._placed else name
                node = to_node(at, scope, self._dialect, schema, trim_selects=False)
                columns.append((name, frozenset(self._sources(node))))
        return _Selected(columns, not query.is_star, self._placed)

    def _check_places(self) -> None:
        """Refuses a star if columns correspond by position."""
        for union in self._query.find_all(exp.SetOperation):
            if union.is_star or union.expression.is_star or union.args.get("by_name"):
                raise _Unknown
        for alias in self._query.find_all(exp.TableAlias):
            inner = alias.parent.this if alias.parent is not None else None
            if alias.columns and (
                (isinstance(inner, exp.Query) and inner.is_star) or isinstance(inner, exp.Identifier)
            ):
                raise _Unknown

    def _renamed(self) -> dict[str, str]:
        """Gives every table outside of the query a plain name; returns the original names by these."""
        if any(not isinstance(one.this, exp.Query) for one in self._query.find_all(exp.CTE)):
            raise _Unknown  # rows that an INSERT, UPDATE or DELETE returns
        names: dict[str, str] = {}
        seen: set[int] = set()
        for scope in traverse_scope(self._query):
            for alias, source in scope.sources.items():
                if not isinstance(source, exp.Table) or id(source) in seen:
                    continue
                if not isinstance(source.this, exp.Identifier):
                    continue  # a function
                seen.add(id(source))
                name = _name_of(source)
                own = names.setdefault(name, f"noetl_table_{len(names)}")
                if not source.alias:
                    source.set("alias", exp.TableAlias(this=exp.to_identifier(alias, quoted=True)))
                source.set("this", exp.to_identifier(own))
                source.set("db", None)
                source.set("catalog", None)
            for column in scope.columns:
                if column.table in scope.sources:  # else a field of a struct
                    column.set("db", None)
                    column.set("catalog", None)
        return {own: name for name, own in names.items()}

    def _only_star(self) -> str | None:
        """Returns the one table of a query that selects all of its columns and nothing else."""
        query = self._query
        if not isinstance(query, exp.Select) or len(query.expressions) != 1 or not query.is_star:
            return None
        tables = list(query.find_all(exp.Table))
        if len(tables) != 1 or query.args.get("joins") or query.args.get("laterals"):
            return None
        if any(query.expressions[0].find(exp.Star).args.values()):
            return None  # EXCEPT, REPLACE
        name = tables[0].name
        return name if name in self._tables else None

    def _sources(self, node: Node) -> Iterator[TableColumnName]:
        """Yields the columns of tables at the ends of a graph of lineage."""
        for above, leaf in _ends(node):
            own = leaf.expression.name if isinstance(leaf.expression, exp.Table) else ""
            if own not in self._tables or MARK in (table := self._tables[own]):
                continue
            column = _column_of(above, leaf)
            if column is None or MARK in column:
                continue
            spelled = self._spelled.get(own)
            if spelled is not None:
                if column not in spelled:
                    continue  # a whole row, or a column that the table does not have
                column = spelled[column]
            elif self._dialect != "spark" and column == leaf.expression.alias_or_name:
                continue  # a whole row, most likely
            if table in self._made:
                yield from self._made[table].get(column, ())
            else:
                yield table, column

    def _folded(self, column: str) -> str:
        return column if self._dialect == "postgres" else column.lower()


def _ends(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yields every node that has none below it, each with the one above."""
    seen: set[tuple[int, int]] = set()
    waiting = [node]
    while waiting:
        above = waiting.pop()
        for below in above.downstream:
            if (id(above), id(below)) in seen:
                continue
            seen.add((id(above), id(below)))
            if below.downstream:
                waiting.append(below)
            else:
                yield above, below


def _column_of(above: Node, leaf: Node) -> str | None:
    """Returns the column that an end of a graph stands for; None if that is unknown."""
    column = exp.to_column(leaf.name) if leaf.name not in ("", "*") else None
    if column is not None and column.name not in ("", "*"):
        return str(column.name)
    # of a star: the column has the name under which it was selected, if there is one table only
    select = above.source
    only = isinstance(select, exp.Select) and not (select.args.get("joins") or select.args.get("laterals"))
    table = select.find(exp.From) if only else None
    if table is None or table.this is not leaf.expression:
        return None
    name = above.name.rpartition(".")[2]
    return None if name.isdigit() else name


def _named(selected: _Selected, rows: Sequence[str] | None) -> Columns:
    """Returns columns by the names that the rows have, if those are known."""
    if rows is None:
        named = [one for one in selected.columns if MARK not in one[0] and not one[0].startswith("_col_")]
        return dict(named)
    if selected.placed and len(rows) == len(selected.columns):
        return dict(zip(rows, (sources for _, sources in selected.columns), strict=True))
    spelled = {row.lower(): row for row in rows}
    return {spelled[name.lower()]: sources for name, sources in selected.columns if name.lower() in spelled}


def _name_of(table: exp.Table) -> str:
    return ".".join(part.name for part in table.parts)
