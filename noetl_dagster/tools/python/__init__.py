"""The ``python`` tool: playbook code in threads of this process, or in a separate interpreter."""
