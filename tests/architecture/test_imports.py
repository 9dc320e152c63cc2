"""Imports go one way, and only the thin faces know Dagster."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "noetl_dagster"

LAYERS = [
    {"errors", "settings"},
    {"playbook", "embedded"},
    {"events", "storage"},
    {"tools", "spark", "records_api"},
    {"worker", "engine", "transport"},
    {"resources", "io_managers"},
    {"compiler", "sensors", "schedules", "service"},
    {"definitions", "cli", "__main__"},
]
"""From the ground up: a module may import from its own layer and those below."""

KNOW_DAGSTER = {
    "compiler",
    "resources",
    "io_managers",
    "sensors",
    "schedules",
    "definitions",
    "cli",
    "service",
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(part: str) -> int:
    return next(level for level, parts in enumerate(LAYERS) if part in parts)


def part_of(module: str) -> str | None:
    """The package or module below ``noetl_dagster`` that a dotted name belongs to."""
    names = module.split(".")
    return names[1] if names[0] == "noetl_dagster" and len(names) > 1 else None


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that a module imports at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for module in imports_of(path):
        other = part_of(module)
        if other is None or other == own or other.startswith("__"):
            continue
        if other not in {part for parts in LAYERS for part in parts}:
            continue
        if module.startswith("noetl_dagster.result_ref") and own in ("playbook", "events"):
            continue
        assert layer_of(other) <= layer_of(own), f"{own} imports {module}, which lies above it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_faces_import_dagster(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in KNOW_DAGSTER or own == "__main__":
        return
    for module in imports_of(path):
        assert module.split(".")[0] not in ("dagster", "dagster_pyspark", "dagster_postgres"), (
            f"{own} imports {module}; only {', '.join(sorted(KNOW_DAGSTER))} may"
        )
