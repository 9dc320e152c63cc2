"""Executions as a whole: start, end, cancel, resume, and what there is to tell about them."""
