"""Column lineage of steps whose work is SQL: which column of the result was made of which columns of which assets.

Nothing is guessed: what cannot be known is left out. Gives the lineage of a step, and the tables that steps write,
to the compiler. Stands on ``playbook`` and ``tools``.
"""
