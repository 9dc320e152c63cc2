"""The Dockerfile: what it says, and each of its steps run in a clean root."""
