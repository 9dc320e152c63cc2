"""Column lineage of steps whose work is SQL: the asset columns from which each column of a result is made.

It contains only what is certain; columns with unknown sources are left out.
"""
