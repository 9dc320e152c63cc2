"""Dagster's private names: few, each with a comment where it is imported, and none of its private methods replaced."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.architecture.imports import ROOT, imports_of, modules

AT_MOST = 24
"""Private names of Dagster that the package imports."""


def is_private(module: str) -> bool:
    return module.startswith(("dagster._", "dagster_shared."))


def private_imports() -> Iterator[tuple[Path, ast.ImportFrom]]:
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and is_private(node.module or ""):
                yield path, node


def test_every_private_name_has_a_comment() -> None:
    silent = []
    for path, node in private_imports():
        lines = path.read_text(encoding="utf-8").splitlines()
        if "# private: " not in "\n".join(lines[node.lineno - 2 : node.end_lineno]):
            silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not silent, "say in '# private: ...' what the name is for; look for a public way first"


def test_there_are_few() -> None:
    names = {alias.name for _, node in private_imports() for alias in node.names}
    assert len(names) <= AT_MOST, sorted(names)


def test_no_private_method_of_dagster_is_replaced() -> None:
    replaced = []
    for name in modules():
        if not any(one.module.split(".")[0].startswith("dagster") for one in imports_of(name)):
            continue
        for own in vars(import_module(name)).values():
            if not inspect.isclass(own) or own.__module__ != name:
                continue
            theirs = [base for base in own.__mro__ if base.__module__.startswith("dagster")]
            replaced += [
                f"{name}.{own.__name__}.{method}"
                for method, function in vars(own).items()
                if method.startswith("_") and not method.startswith("__") and inspect.isfunction(function)
                if any(method in vars(base) for base in theirs)
            ]
    assert not replaced
