"""What people ask of playbooks: to register them, to run them, and how they do.

Gives the routers of ``catalog`` and ``executions`` to ``app``. Stands on ``access``, ``plane`` and ``problems``.
"""
