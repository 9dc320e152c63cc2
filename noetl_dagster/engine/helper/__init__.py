"""A helper process of a run: forked from a template, it works on what the driver's teams hand out.

``python -m noetl_dagster.engine.helper`` is the template. Gives nothing to be imported: the crew starts it by name.
Stands on ``crew``, ``fanout``, ``loops`` and ``runtime``.
"""
