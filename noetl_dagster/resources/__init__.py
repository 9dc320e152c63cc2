"""Dagster resources: the engine of a process, and Spark.

Gives ``NoetlResource`` to ops, sensors and schedules, and a session to ordinary assets. Stands on
``embedded``, ``engine`` and ``spark``.
"""
