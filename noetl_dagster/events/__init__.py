"""The event log, the only truth about every execution: types, identifiers, store, folding."""
