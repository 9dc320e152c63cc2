"""Loops inside one step: the collection, its commands in bulk, their attempts, and the result from the log.

Gives loops and the pieces of them to steps and fan-outs. Stands on ``crew`` and ``runtime``.
"""
