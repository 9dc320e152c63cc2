"""Where a transfer writes: each kind of place by a module, PostgreSQL by ``postgres`` beside this package.

Gives ``write_to`` in ``writing`` to the tool. Stands on ``checksum``, ``chunks``, ``drift``, ``options``, ``places``,
``postgres``, ``sources``.
"""
