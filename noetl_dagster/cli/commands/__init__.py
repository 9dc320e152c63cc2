"""The commands, one module a family; each is loaded when it is called."""
