"""Reads the imports of every module of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "noetl_dagster"


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a module imports.

    Attributes:
        place: path and line of the statement.
        module: dotted name of the imported module.
    """

    place: str
    module: str


@cache
def modules() -> Mapping[str, Path]:
    """Returns every module and package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """Returns what a module imports, inside functions and for types too."""
    path = modules()[module]
    where, found = path.relative_to(ROOT), []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else node.module for name in full]
        else:
            continue
        found += [Import(f"{where}:{node.lineno} imports {name}", name) for name in names]
    return tuple(found)


def packages() -> Iterator[tuple[str, list[str]]]:
    """Yields every package with the modules directly in it, without sub-packages and ``__init__``."""
    for name, path in modules().items():
        if path.name == "__init__.py":
            yield (
                name,
                [other for other, at in modules().items() if at.parent == path.parent and at != path],
            )


def cycle_of(package: str) -> list[str]:
    """Returns the first import cycle among the modules and sub-packages of a package.

    Returns:
        One line for each import in the cycle: ``path:line imports module``; empty when there is none.
    """
    imports = _imports_between_children(package)
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for child, other in imports:
        sorter.add(child, other)
    try:
        sorter.prepare()
    except CycleError as error:
        return [imports[pair] for pair in pairwise(error.args[1][::-1])]
    return []


def _imports_between_children(package: str) -> Mapping[tuple[str, str], str]:
    """Returns which child of a package imports which other, with the first place that does."""
    found: dict[tuple[str, str], str] = {}
    for name in modules():
        if (child := _child(package, name)) is None:
            continue
        for one in imports_of(name):
            other = _child(package, one.module)
            if other is not None and other != child:
                found.setdefault((child, other), one.place)
    return found


def _child(package: str, module: str) -> str | None:
    """Returns the module or sub-package directly below ``package`` that contains ``module``, if any."""
    if module == package:
        return "__init__"
    if not module.startswith(f"{package}."):
        return None
    return module.removeprefix(f"{package}.").partition(".")[0]
