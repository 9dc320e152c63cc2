"""Recovery and upkeep: abandoned executions, expired claims, and the partitions of the log."""
