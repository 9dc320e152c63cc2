"""Reads playbooks in any accepted spelling into canonical models, checks them, and compiles their templates."""
