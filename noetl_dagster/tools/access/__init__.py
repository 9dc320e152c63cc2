"""What tools reach the outside with: credentials, the keychain, and clients that a process shares."""
