"""Which process drives an execution, and how it hears that it must stop."""
