"""Playbooks become Dagster graphs, assets and jobs.

Steps are ops, arcs are tokens between them, fan-outs are dynamic outputs; an op calls the engine and holds
nothing. Gives ``compile_playbook`` to the code location, and which run drives which execution to the
sensors. Stands on ``engine``, ``events``, ``executors``, ``io_managers``, ``lineage``, ``playbook``, ``resources``,
``storage``, ``tools`` and ``worker``.
"""

from noetl_dagster.compiler.job import PlaybookJob, compile_playbook

__all__ = ["PlaybookJob", "compile_playbook"]
