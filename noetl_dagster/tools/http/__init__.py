"""The ``http`` tool: its request, the bodies of responses, and rows of a body in chunks."""
