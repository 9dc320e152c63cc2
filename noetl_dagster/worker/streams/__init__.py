"""Results while they are made: chunks in the log, on their way from one step to those that take them.

Gives ``Streams`` to the runner and to the engine. Stands on ``command``.
"""
