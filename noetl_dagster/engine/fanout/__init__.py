"""Fan-out: one command a shard, groups of shards for Dagster or slices for Spark, one fan-in.

Gives expansion, groups and fan-in to the walker and to ops. Stands on ``crew``, ``loops``, ``runtime`` and ``steps``.
"""
