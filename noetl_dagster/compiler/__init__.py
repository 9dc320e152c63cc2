"""Playbooks become Dagster graphs, assets and jobs."""

from noetl_dagster.compiler.job import PlaybookJob, compile_playbook

__all__ = ["PlaybookJob", "compile_playbook"]
