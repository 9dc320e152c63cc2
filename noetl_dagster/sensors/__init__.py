"""Dagster sensors and schedules: NATS events, abandoned executions, the projection, the reaper and the maintenance."""
