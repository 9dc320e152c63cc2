"""Tests, laid out like the package."""

from noetl_dagster.events import schema

PARTITIONS_AHEAD = schema.PARTITIONS_AHEAD
"""Partitions that the log has ahead of time."""

schema.PARTITIONS_AHEAD = 0
"""The databases of tests have none ahead: sessions plan their statements for each partition."""
