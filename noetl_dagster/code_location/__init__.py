"""The code location: a folder of playbooks as Definitions, and their jobs run in this process."""
