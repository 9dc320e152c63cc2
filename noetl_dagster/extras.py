"""The optional dependencies: the extras of the package, and the one text that names a missing one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

EXTRAS: Mapping[str, str] = {
    "ducklake": "duckdb_extension_ducklake",
    "gcs": "google.cloud.storage",
    "k8s": "kubernetes",
    "mysql": "pymysql",
    "snowflake": "adbc_driver_snowflake",
    "bigquery": "adbc_driver_bigquery",
}
"""Each extra that a tool kind needs (``ToolKind.extra``), with a module that shows whether it is installed."""


def needs_extra(what: str, extra: str) -> str:
    """Returns the text that something needs an extra that is not installed, with the command that installs it."""
    return f"{what} needs the extra {extra}: pip install 'noetl-dagster[{extra}]'"


def has_extra(extra: str) -> bool:
    """Returns whether an extra is installed, without importing it."""
    try:
        return find_spec(EXTRAS[extra]) is not None
    except ModuleNotFoundError:  # a package above the module is missing
        return False
