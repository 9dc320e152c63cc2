"""The control plane: admission, loops, issuing commands, fan-in, routing, retry and recovery. Never runs a tool.

``engine`` puts one together, ``walker`` drives a whole execution, ``children`` those of ``kind: playbook``,
``runtime`` is what every part of it works with. Gives ``Engine`` to ops, services and the command line.
Stands on ``events``, ``playbook``, ``spark``, ``storage``, ``tools``, ``transport`` and ``worker``.
"""
