"""What a process may use of its machine."""
