"""The control plane's upkeep by hand: making what a deployment needs, projecting, reaping, maintenance.

Gives the commands ``provision``, ``project``, ``reap`` and ``maintain`` to ``app``, by name. Stands on
``ingest``.
"""
