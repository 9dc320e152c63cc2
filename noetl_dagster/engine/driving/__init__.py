"""Which process drives an execution, and how it hears that it must stop.

Gives locks that die with their process, and a watch that cancels work, to steps, executions and pool
workers. Stands on the ground floor.
"""
