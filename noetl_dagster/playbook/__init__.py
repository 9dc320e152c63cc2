"""The playbook language: models, loading with line numbers, the graph of steps.

A document comes in through ``loader``, in any accepted spelling, and leaves as the canonical model of
``models``. Gives ``Playbook``, ``StepGraph`` and compiled templates to everybody. Stands on the ground
floor.
"""
