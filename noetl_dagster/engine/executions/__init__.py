"""Executions as a whole: start, end, cancellation, resumption, overviews, progress and results."""
