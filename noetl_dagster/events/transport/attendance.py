"""Pools that have workers, and those that have none; for who only looks, and needs no NATS."""

from __future__ import annotations

MISSED_REPORTS = 3
"""A worker that misses so many reports is taken for gone."""


def no_worker(pool: str) -> str:
    """What is said of a pool that commands wait for and that has no worker."""
    return f"no worker of pool {pool} reports; start one with 'noetl-dagster worker --pool {pool}'"
