"""Data sources of Spark: results by reference, and the event log by partition.

Spark's own Python processes load them, so they import little. Gives their names to ``sessions``, which
registers them. Stands on the ground floor.
"""
