"""``kind: transfer``: copies rows from one place to another, chunk by chunk.

``tool`` opens the source and dispatches on the target; ``postgres_target``, ``duckdb_target`` and ``folders`` stage
rows by the contract of ``staging``, so that a command that runs again resumes the copy.
"""
