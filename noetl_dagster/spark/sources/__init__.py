"""Data sources of Spark: results by reference, and the event log by partition."""
