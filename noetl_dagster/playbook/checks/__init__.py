"""Finds mistakes of well-formed playbooks without running them."""
