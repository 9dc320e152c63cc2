"""``/workers``: the workers of the pools, what waits for them, and their messages that could not be ingested."""
