"""Programs outside of this process: shell commands, scripts, Kubernetes Jobs."""
