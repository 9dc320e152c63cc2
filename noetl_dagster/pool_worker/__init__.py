"""A worker process of the pool: takes notices, claims commands over the protocol, runs them with the data plane."""
