"""The processes of a run: large loops and fan-outs on all cores, the control plane in one of them.

The process that drives an execution has helpers, forked from a template that has imported everything. Driver and
helpers take ranges of a loop's items in turn, run their commands and write their events; routing stays with the
driver. What a helper had taken and did not end goes back to the others, and the log knows what is done.

Gives a ``Team`` for each range of a loop to loops and fan-outs. Stands on the ground floor.
"""
