"""Compiles playbooks into Dagster graphs, assets and jobs.

Steps become ops, arcs become tokens between them, and fan-outs become dynamic outputs. An op calls the engine and
keeps no state. :func:`noetl_dagster.compiler.job.compile_playbook` is the entry point.
"""
