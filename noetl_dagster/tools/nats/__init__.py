"""The ``nats`` tool: key-value buckets, objects, and messages to and from a NATS server."""
