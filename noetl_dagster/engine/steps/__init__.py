"""One visit of a step: its turn, its tasks or loop, ``set``, the arcs that fire; and regions of several steps.

Gives steps and regions to executions, fan-outs and the walker, watermarks to recovery and the command line.
Stands on ``driving``, ``loops`` and ``runtime``.
"""
