"""The control plane: admission, loops, issuing commands, fan-in, routing, retry and recovery. It never runs a tool.

``engine`` puts one together, ``walker`` drives whole executions and child playbooks, ``helpers`` and ``sharing`` spread
large loops over processes, and ``runtime`` holds the connections of a process.
"""
