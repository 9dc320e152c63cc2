"""What a playbook says in Kubernetes' words.

Gives ``read_pod`` to specs, and ``check_container`` to the tasks of a step. Stands on ``block`` and ``spelling``.
"""
