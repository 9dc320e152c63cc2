"""The event log, the only truth about every execution: types, identifiers, appends, reads, folding.

Gives ``EventLog``, ``EventBuffer`` and ``ExecutionState`` to all that write or read what happened. Stands
on the ground floor.
"""
