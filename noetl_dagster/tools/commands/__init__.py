"""Programs beside this one: shell commands, scripts, Kubernetes Jobs."""
