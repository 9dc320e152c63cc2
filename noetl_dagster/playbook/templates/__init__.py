"""Templates: rendering them, the names they see, and how results look to them.

Gives compiled values and scopes to whoever runs or checks a playbook. Stands on ``wording``.
"""
