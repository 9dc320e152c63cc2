"""Dagster IO managers over the tiers of the result store.

Gives step results by reference to ops, and values of ordinary assets on minio, pvc and gcs to any project.
Stands on ``storage``.
"""

from noetl_dagster.io_managers.results import NoetlResultIOManager
from noetl_dagster.io_managers.tiered import GcsIOManager, MinioIOManager, PvcIOManager

__all__ = ["GcsIOManager", "MinioIOManager", "NoetlResultIOManager", "PvcIOManager"]
