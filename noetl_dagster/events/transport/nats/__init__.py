"""JetStream: connections, names, streams and consumers, publishing and pulling.

Gives a connection that outlives its server, and ``NatsTransport``, to workers, ingestors and the engine.
Stands on ``base`` and ``wire``.
"""
