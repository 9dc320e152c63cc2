"""The chart, rendered by Helm's own engine: no cluster."""
