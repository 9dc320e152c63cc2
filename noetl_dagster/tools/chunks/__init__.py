"""Results that are made chunk by chunk: stored and told of as they come, never held as a whole.

Gives ``ChunkWriter``, ``Gathering`` and ``ChunkedResult`` to the tools, files and stored results in chunks to
``artifact``. Stands on ``base`` and ``rows``.
"""
