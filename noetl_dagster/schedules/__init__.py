"""Thin Dagster schedules over the control plane."""
