"""Pages for people: executions, playbooks and workers in a browser, rendered on the server."""
