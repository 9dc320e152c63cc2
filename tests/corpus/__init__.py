"""Small playbooks as users write them, each with what its execution must come to."""
