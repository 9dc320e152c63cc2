"""The worker process of a pool: it claims commands over the protocol, many at once, and runs them."""
