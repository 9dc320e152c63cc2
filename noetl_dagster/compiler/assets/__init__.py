"""What Dagster is told of a playbook's assets: partitions, schedules, checks, owners, metadata, what they read.

Gives definitions to the job of a playbook, and ``partition_of`` to whoever starts executions. Stands on
``names``.
"""
