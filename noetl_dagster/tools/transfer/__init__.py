"""``kind: transfer``: rows from one place to another, chunk by chunk.

Gives ``TransferTool`` to the registry; ``sources`` and ``targets`` know every kind of place, ``postgres`` how a
transfer outlives its process. Stands on ``access``, ``base``, ``http``, ``limits``, ``references``, ``rows`` and
``sql``.
"""
