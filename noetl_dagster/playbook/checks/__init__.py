"""What a well-formed playbook may still have wrong, found without running it."""
