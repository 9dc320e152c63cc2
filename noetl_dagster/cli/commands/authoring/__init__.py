"""Commands for those who write playbooks: nothing here runs one.

Gives ``language`` (``check``, ``schema``), ``migration`` (``migrate``) and ``scaffold`` (``init``, ``new``).
Stands on the ground floor.
"""
