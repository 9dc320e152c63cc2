"""Buckets of compute logs that no library of Dagster's among the dependencies reads.

``gcs`` reads and writes those of Google Cloud Storage. Gives ``GcsLogs`` to ``stored_logs``. Stands on
``compute_logs``.
"""
