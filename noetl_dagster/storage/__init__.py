"""Results of steps: the store that chooses a tier, manifests of parts, removal, and access by URI.

``ResultStore`` is asynchronous; ``locations`` serves Spark, DuckDB and IO managers without an event loop.
"""
