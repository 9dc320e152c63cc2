"""``kind: transfer``: rows from one place to another, chunk by chunk."""
