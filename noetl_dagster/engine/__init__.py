"""The control plane: admission, loops, issuing commands, fan-in, routing, retry and recovery. It never runs a tool.

``engine`` puts one together, ``walker`` drives a whole execution, ``children`` drives those of ``kind: playbook``,
``helpers`` and ``sharing`` spread large loops over processes, and ``runtime`` holds the connections of a process.
"""
