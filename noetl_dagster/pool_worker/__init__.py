"""A worker process of the pool: claims commands over the protocol, many at once, and runs them.

A program above the engine: it uses the data plane's library, and the engine's watch to hear of
cancellations. Gives ``PoolWorker`` to the command line. Stands on ``engine``, ``events``, ``transport`` and
``worker``.
"""
