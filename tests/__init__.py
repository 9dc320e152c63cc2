"""Tests, laid out like the package."""

from noetl_dagster.events import schema

MONTHS_AHEAD = schema.MONTHS_AHEAD
"""Partitions that the log has ahead of time."""

schema.MONTHS_AHEAD = 0
"""The databases of tests have none ahead: sessions plan their statements for each partition."""
