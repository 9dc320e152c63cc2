"""``kind: python``: playbook code in threads of this process, or in an interpreter of its own."""
