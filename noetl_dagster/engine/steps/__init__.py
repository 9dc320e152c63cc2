"""One visit of a step: its turn, its tasks or loop, ``set``, the arcs it fires, and regions of several steps."""
