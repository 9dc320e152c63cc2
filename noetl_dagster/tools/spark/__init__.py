"""``kind: spark``: SQL or a function over DataFrames, and what such a task reads.

Gives ``SparkTool`` to the registry. Stands on ``base``, ``limits``, ``python``, ``rows`` and ``scripts``.
"""
