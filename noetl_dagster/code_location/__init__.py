"""The code location: playbooks as Dagster Definitions, as a component, and runs of them in this process."""
