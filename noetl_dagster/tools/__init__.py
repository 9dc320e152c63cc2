"""Tools: a tool gets rendered fields and gives a value or raises ``ToolError``.

A kind of one module stands here, a kind of several in a room. ``base`` is the contract with the data plane,
``registry`` says which class runs which kind, and loads it on first use. Gives ``tool_for`` and ``Toolbox``
to the data plane. Stands on ``events``, ``playbook``, ``spark`` and ``storage``.
"""
