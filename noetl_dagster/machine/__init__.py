"""What this process may use of its machine: a container's limits, not the node's cores and memory.

Gives ``cores``, ``processes`` and ``driver_memory`` to everybody. Stands on the ground floor.
"""

from noetl_dagster.machine.limits import cores, driver_memory, memory_limit, processes

__all__ = ["cores", "driver_memory", "memory_limit", "processes"]
