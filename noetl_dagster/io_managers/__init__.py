"""Dagster IO managers over the tiers of the result store.

Gives step results by reference to ops, and values of ordinary assets on minio, pvc and gcs to any project.
Stands on ``spark`` and ``storage``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noetl_dagster.io_managers.results import NoetlResultIOManager
    from noetl_dagster.io_managers.tiered import GcsIOManager, MinioIOManager, PvcIOManager

_MODULES = {
    "GcsIOManager": "tiered",
    "MinioIOManager": "tiered",
    "NoetlResultIOManager": "results",
    "PvcIOManager": "tiered",
}

__all__ = ["GcsIOManager", "MinioIOManager", "NoetlResultIOManager", "PvcIOManager"]


def __getattr__(name: str) -> Any:
    """Loads what is asked for: a playbook's run needs one of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
