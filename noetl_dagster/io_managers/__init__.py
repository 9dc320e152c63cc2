"""Dagster IO managers over the tiers of the result store."""

from noetl_dagster.io_managers.results import NoetlResultIOManager
from noetl_dagster.io_managers.tiered import GcsIOManager, MinioIOManager, PvcIOManager

__all__ = ["GcsIOManager", "MinioIOManager", "NoetlResultIOManager", "PvcIOManager"]
