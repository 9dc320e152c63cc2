"""JetStream: connections, names, streams and consumers, publishing and pulling."""
