"""``kind: python``: playbook code in threads of this process, or in an interpreter of its own.

Gives ``PythonTool`` to the registry, threads and compiled code to the spark tool. Stands on ``base``, ``chunks``,
``commands``, ``limits``, ``rows`` and ``scripts``.
"""
