"""``kind: spark``: the task and what it reads."""
