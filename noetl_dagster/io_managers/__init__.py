"""Dagster IO managers over the tiers of the result store.

One passes step results by reference; the others store ordinary assets of any project on minio, pvc and gcs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noetl_dagster.io_managers.gcs import GcsIOManager
    from noetl_dagster.io_managers.minio import MinioIOManager
    from noetl_dagster.io_managers.pvc import PvcIOManager
    from noetl_dagster.io_managers.results import NoetlResultIOManager

__all__ = ["GcsIOManager", "MinioIOManager", "NoetlResultIOManager", "PvcIOManager"]

_MODULES = {
    "GcsIOManager": "gcs",
    "MinioIOManager": "minio",
    "NoetlResultIOManager": "results",
    "PvcIOManager": "pvc",
}


def __getattr__(name: str) -> Any:
    """Imports an IO manager on first use: a playbook's run needs only one of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
