"""Reads playbooks in any accepted spelling into canonical models, checks them, and compiles their templates.

``loader`` reads a text, ``models`` holds the result, ``graph`` the arcs between its steps.
"""
