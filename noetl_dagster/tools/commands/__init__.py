"""Programs beside this one: shell commands, scripts, Kubernetes Jobs.

Gives ``ShellTool`` and ``ContainerTool`` to the registry, child processes with bounds to the python tool.
Stands on ``base``, ``limits``, ``rows`` and ``scripts``.
"""
