"""Thin Dagster schedules over the control plane: the reaper and the maintenance.

Gives jobs and their schedules to the code location. Stands on ``resources``.
"""
