"""The control plane: admission, loops, issuing commands, fan-in, routing, retry and recovery. Never runs a tool."""
