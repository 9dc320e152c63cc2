"""Rewrites playbooks from older words to those of today; comments, order, quotes and styles stay."""
