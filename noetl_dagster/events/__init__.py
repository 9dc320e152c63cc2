"""The event log, the only truth about every execution: types, identifiers, appends, reads, folding.

Gives ``EventLog``, ``EventBuffer`` and ``ExecutionState`` to all that write or read what happened, and
``RegisteredPlaybooks`` to all that start something. Stands on ``playbook``.
"""
