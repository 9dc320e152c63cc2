"""Reads each part of a playbook, in any accepted spelling, into its canonical model.

``block`` reads one mapping by the declarations of a model and reports unknown keys.
"""
