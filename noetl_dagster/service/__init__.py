"""The HTTP API of the control plane: events, claims, executions, workers, results and metrics."""
