"""Reads each part of a playbook, in any accepted spelling, into its canonical model."""
