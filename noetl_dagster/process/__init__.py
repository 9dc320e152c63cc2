"""What every process has: logs, traces, an event loop, interrupts and retries of infrastructure."""
