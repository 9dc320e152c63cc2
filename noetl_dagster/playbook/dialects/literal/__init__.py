"""What tasks say literally that their tools would refuse, or pass over, when they run.

Gives ``check_task`` to the tasks of a step. Stands on ``block``.
"""
