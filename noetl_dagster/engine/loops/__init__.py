"""Loops inside one step: their items, the commands in bulk, the attempts, and the result from the log."""
