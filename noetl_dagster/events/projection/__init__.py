"""The projection: ``noetl.execution``, folded from the log in commit order."""
