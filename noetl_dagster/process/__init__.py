"""Services that every process needs: logs, traces, the event loop, interrupts, and retries of infrastructure."""
