"""The tools, one module or folder for each kind.

A tool receives rendered fields, and returns a value or raises ``ToolError``. ``base`` defines the contract with the
data plane. ``registry`` maps each kind to its class, which is imported on first use.
"""
