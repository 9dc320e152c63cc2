"""How commands reach workers and events reach the log: direct, over HTTP, over NATS.

All end in ``intake``, in one transaction; ``queries`` holds the queue's statements. Gives transports to
workers, an ``Ingestor`` to services and sensors, the queue to the engine. Stands on ``events``.
"""
