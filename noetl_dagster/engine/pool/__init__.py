"""The control plane's side of the worker pool: queueing and claiming commands, and waiting for their ends."""
