"""How commands reach workers and events reach the log: direct, over HTTP, over NATS."""
