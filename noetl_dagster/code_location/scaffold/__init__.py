"""Commented starts: a project that works, a playbook, a step.

Gives ``new_project``, ``new_playbook`` and ``new_step`` to the command line, and a first playbook to components of
``dg``. Stands on ``playbook``.
"""
