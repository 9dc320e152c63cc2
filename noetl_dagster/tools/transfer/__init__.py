"""``kind: transfer``: copies rows from one place to another, chunk by chunk.

``tool`` opens the source and dispatches on the target; ``postgres_target`` and ``folders`` stage rows so that a
command that runs again resumes the copy.
"""
