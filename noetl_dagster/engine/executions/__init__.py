"""Executions as a whole: start, end, cancel, resume, and what there is to tell about them.

Gives the life of an execution to the walker and ops, overviews to the command line and the API. Stands on
``driving``, ``loops``, ``runtime`` and ``steps``.
"""
