"""The parts of an installation: the extras, the text that names a missing one, and the folders beside the code."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

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


def shipped_folder(name: str) -> Path:
    """Returns a folder that the wheel contains in the package, and a checkout beside it."""
    package = Path(__file__).parent
    return package / name if (package / name).is_dir() else package.parent / name
