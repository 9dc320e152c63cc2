"""The data plane: claims commands, runs their tools, stores results and reports what happened. Never routes.

Gives ``CommandRunner`` and the programs of steps to the engine, which runs them in the op or hands them to
a pool. Stands on ``events``, ``playbook``, ``storage``, ``tools`` and ``transport``.
"""
