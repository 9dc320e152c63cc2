"""Sinks that share no transaction with the event log: DuckDB, files, buckets.

Each iteration writes a part under its own name, where no reader looks; its completion in the log says where; then
the part is published, once. Gives ``PartSinks`` to the data plane and the control plane. Stands on ``access``,
``base``, ``rows`` and ``sql``.
"""
