"""``libs``: modules that code has without importing them."""

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
"""Distributions of other names than their modules: what is not installed cannot say so itself."""

_REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*(?:[<>=!~].*)?", re.ASCII | re.DOTALL)


def import_libs(libs: Any) -> dict[str, Any]:
    """What ``libs`` makes available, by name.

    ``libs`` is a list of modules, ``module as alias`` or mappings, or a mapping ``{alias: module}``. For a module may
    stand ``{from: module, import: name}``, and a distribution's name where it differs (``PyYAML`` for ``yaml``).

    Raises:
        ImportError: there is no such module or name; the message says what to install.
    """
    if not libs:
        return {}
    found: dict[str, Any] = {}
    entries = [libs] if isinstance(libs, str | Mapping) else libs
    for entry in entries:
        found.update(_imported(entry))
    return found


def _imported(entry: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(entry, Mapping):
        module, _, alias = str(entry).partition(" as ")
        yield _bound(module.strip(), alias.strip())
    elif "from" in entry and "import" in entry:
        for name in _names(entry["import"]):
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


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _bound(name: str, alias: str) -> tuple[str, Any]:
    """A module under its alias, else under the name that ``import`` binds: of ``a.b`` that is ``a``."""
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
    """The address of a module that stands under its own name or its distribution's, and the module."""
    try:
        return name, importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
    for module in modules_of(name):
        with contextlib.suppress(ModuleNotFoundError):
            return module, importlib.import_module(module)
    raise ModuleNotFoundError(
        f"libs: no module {name!r}; install the distribution {distribution_of(name)!r} where playbooks run",
        name=name,
    )


def modules_of(distribution: str) -> Iterator[str]:
    """The modules that a distribution may be meant for, the likeliest first."""
    match = _REQUIREMENT.fullmatch(distribution)
    wanted = _plain(distribution if match is None else match[1])
    yield from (module for module, name in DISTRIBUTIONS.items() if _plain(name) == wanted)
    modules = [module for module, names in _installed().items() if wanted in names]
    yield from sorted(modules, key=lambda module: (module.startswith("_"), _plain(module) != wanted, module))


@cache
def _installed() -> dict[str, frozenset[str]]:
    """The distributions of every module; reading the metadata of all that is installed takes its time."""
    from importlib.metadata import packages_distributions

    return {module: frozenset(map(_plain, names)) for module, names in packages_distributions().items()}


def distribution_of(module: str) -> str:
    """The distribution to install for a module; its own name where nothing else is known."""
    parts = module.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((DISTRIBUTIONS[name] for name in prefixes if name in DISTRIBUTIONS), parts[0])


def _plain(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
