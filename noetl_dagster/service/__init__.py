"""The HTTP API of the control plane: events, claims, executions, workers, results, metrics.

Gives ``create_app`` to the command line, which serves it. Stands on ``compiler``, ``engine``, ``events``, ``playbook``,
``transport`` and ``worker``.
"""
