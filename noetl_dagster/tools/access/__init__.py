"""Credentials, the keychain, and the clients that the tools of a process share."""
