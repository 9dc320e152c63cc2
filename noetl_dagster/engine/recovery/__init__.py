"""What is left behind: abandoned executions, silent claims, old partitions."""
