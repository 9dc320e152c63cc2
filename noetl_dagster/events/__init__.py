"""The event log, the single source of truth about every execution: types, ids, appends, reads, folds, projection.

It also holds the schema of the database, registered playbooks, and the transports that carry events and commands.
"""
