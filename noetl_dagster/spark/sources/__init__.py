"""Spark data sources: results by reference, and the event log by slices.

Spark's own Python processes load them, so they import little.
"""
