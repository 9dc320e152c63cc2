"""Sinks: each iteration's result in a table, a file or a bucket, exactly once.

A sink to the event log's own database shares a transaction with the completion. Any other sink stages each
iteration's rows as a part under its own name, and publishes the part when the completion is in the log.
"""
