"""Renders templates: the names that they see, and the views through which they see results."""
