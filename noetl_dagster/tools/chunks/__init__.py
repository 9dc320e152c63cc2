"""Results that are made chunk by chunk: each chunk is stored and recorded before the result is complete."""
