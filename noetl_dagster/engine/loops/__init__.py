"""Loops inside one step: the collection, its commands in bulk, their attempts, and the result from the log."""
