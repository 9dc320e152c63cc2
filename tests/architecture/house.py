"""The house as its imports draw it: modules, packages, and who imports whom."""

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
        module: dotted name of the module that is imported, of ours or of others.
        line: where.
        typing_only: below ``if TYPE_CHECKING``, so not at run time.
    """

    module: str
    line: int
    typing_only: bool


@cache
def modules() -> Mapping[str, Path]:
    """Every module and package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """What a module imports, inside functions too."""
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(tree: ast.Module) -> Iterator[Import]:
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else node.module for name in full]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) in typing_only)


def rooms() -> Iterator[tuple[str, list[str]]]:
    """Every package with the modules that stand side by side in it, sub-packages and ``__init__`` left out."""
    for name, path in modules().items():
        if path.name == "__init__.py":
            yield (
                name,
                [other for other, at in modules().items() if at.parent == path.parent and at != path],
            )


def circles_of(package: str) -> list[str]:
    """The first circle among the doors of a package, its modules and its sub-packages each taken as one.

    Returns:
        One line an import that ties it: ``path:line imports module``; nothing where there is no circle.
    """
    ties = _ties(package)
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for door, other in ties:
        sorter.add(door, other)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = error.args[1][::-1]
        return [ties[pair] for pair in pairwise(circle)]
    return []


@cache
def _ties(package: str) -> Mapping[tuple[str, str], str]:
    """Which door of a package imports which other, with the first place that does."""
    ties: dict[tuple[str, str], str] = {}
    for name, path in modules().items():
        if (door := _door(package, name)) is None:
            continue
        for one in imports_of(path):
            other = _door(package, one.module)
            if other is not None and other != door:
                place = f"{path.relative_to(ROOT)}:{one.line} imports {one.module}"
                ties.setdefault((door, other), place)
    return ties


def _door(package: str, module: str) -> str | None:
    """The module or sub-package of ``package`` by which one gets to ``module``; None when that is elsewhere."""
    if module == package:
        return "__init__"
    if not module.startswith(f"{package}."):
        return None
    return module.removeprefix(f"{package}.").partition(".")[0]
