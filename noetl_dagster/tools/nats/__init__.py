"""``kind: nats``: key-value buckets, objects, messages to and from a NATS server.

Gives ``NatsTool`` to the registry. Stands on ``access``, ``base``, ``chunks`` and ``rows``.
"""
