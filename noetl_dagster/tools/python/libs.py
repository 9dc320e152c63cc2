"""``libs``: modules that code can use without importing them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any


def import_libs(libs: Any) -> dict[str, Any]:
    """Returns the modules and members of ``libs`` by name.

    ``libs`` is a list of modules, ``module as alias`` or mappings, or a mapping ``{alias: module}``. Instead of a
    module you may write ``{from: module, import: name}``.

    Raises:
        ImportError: there is no such module or name.
    """
    entries = [libs] if libs and isinstance(libs, str | Mapping) else libs or ()
    return {name: value for entry in entries for name, value in _imported(entry)}


def _imported(entry: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(entry, Mapping):
        module, _, alias = str(entry).partition(" as ")
        yield _bound(module.strip(), alias.strip())
    elif "from" in entry and "import" in entry:
        modules = entry["import"]
        for name in map(str, modules if isinstance(modules, list) else [modules]):
            yield str(entry.get("as") or name), _member(str(entry["from"]), name)
    else:
        for alias, wanted in entry.items():
            if isinstance(wanted, Mapping):
                module = str(wanted.get("from") or wanted.get("module") or alias)
                member = wanted.get("import") or wanted.get("name")
                yield str(alias), _member(module, str(member)) if member else _module(module)
            elif wanted:
                yield str(alias), _module(str(wanted))
            else:
                yield _bound(str(alias), "")


def _bound(name: str, alias: str) -> tuple[str, Any]:
    """Returns a module under its alias, else under the name that ``import`` binds: ``a`` for ``a.b``."""
    module = _module(name)
    if alias:
        return alias, module
    first = name.partition(".")[0]
    return first, importlib.import_module(first)


def _member(module: str, name: str) -> Any:
    loaded = _module(module)
    if hasattr(loaded, name):
        return getattr(loaded, name)
    return _module(f"{module}.{name}")  # a module of the package


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but its own import fails
    raise ModuleNotFoundError(f"libs: no module {name!r}; install it where playbooks run", name=name)
