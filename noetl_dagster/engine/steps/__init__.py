"""One visit of a step: its entry, tasks or loop, checks, routing and watermark; and regions of several steps."""
