"""``libs``: modules that code can use without importing them."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

DISTRIBUTIONS = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "Crypto": "pycryptodome",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "fitz": "PyMuPDF",
    "google.cloud.bigquery": "google-cloud-bigquery",
    "google.cloud.storage": "google-cloud-storage",
    "jwt": "PyJWT",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyOpenSSL",
    "PIL": "Pillow",
    "psycopg": "psycopg",
    "psycopg2": "psycopg2-binary",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "snowflake.connector": "snowflake-connector-python",
    "yaml": "PyYAML",
}
"""Distributions with other names than their modules, which metadata cannot tell before they are installed."""

_REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*(?:[<>=!~].*)?", re.ASCII | re.DOTALL)


def import_libs(libs: Any) -> dict[str, Any]:
    """Returns the modules and members of ``libs`` by name.

    ``libs`` is a list of modules, ``module as alias`` or mappings, or a mapping ``{alias: module}``. Instead of a
    module you may write ``{from: module, import: name}``, or the distribution's name (``PyYAML`` for ``yaml``).

    Raises:
        ImportError: there is no such module or name; names the distribution to install.
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
    address, module = _loaded(name)
    if alias:
        return alias, module
    first = address.partition(".")[0]
    return first, importlib.import_module(first)


def _member(module: str, name: str) -> Any:
    address, loaded = _loaded(module)
    if hasattr(loaded, name):
        return getattr(loaded, name)
    return _module(f"{address}.{name}")  # a module of the package


def _module(name: str) -> Any:
    return _loaded(name)[1]


def _loaded(name: str) -> tuple[str, Any]:
    """Returns a module and its name, found by that name or by its distribution's."""
    try:
        return name, importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but its own import fails
    for module in modules_of(name):
        with contextlib.suppress(ModuleNotFoundError):
            return module, importlib.import_module(module)
    raise ModuleNotFoundError(
        f"libs: no module {name!r}; install the distribution {distribution_of(name)!r} where playbooks run",
        name=name,
    )


def modules_of(distribution: str) -> Iterator[str]:
    """Yields the modules that a distribution's name may mean, the likeliest first."""
    match = _REQUIREMENT.fullmatch(distribution)
    wanted = _plain(distribution if match is None else match[1])
    yield from (module for module, name in DISTRIBUTIONS.items() if _plain(name) == wanted)
    modules = [module for module, names in _installed().items() if wanted in names]
    yield from sorted(modules, key=lambda module: (module.startswith("_"), _plain(module) != wanted, module))


@cache
def _installed() -> dict[str, frozenset[str]]:
    """Returns the distributions of every module; cached, since it reads all installed metadata."""
    from importlib.metadata import packages_distributions

    return {module: frozenset(map(_plain, names)) for module, names in packages_distributions().items()}


def distribution_of(module: str) -> str:
    """Returns the distribution to install for a module; its own name if no other is known."""
    parts = module.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((DISTRIBUTIONS[name] for name in prefixes if name in DISTRIBUTIONS), parts[0])


def _plain(name: str) -> str:
    """Returns a distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
