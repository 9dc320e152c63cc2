"""What is left behind: abandoned executions, silent claims, old partitions.

Gives what to resume or give up, a reaper and a maintenance to sensors, schedules and the command line.
Stands on ``driving``, ``executions``, ``runtime`` and ``steps``.
"""
