"""Dagster IO managers over the tiers of the result store.

One passes step results by reference; the others store ordinary assets of any project on minio, pvc and gcs.
"""
