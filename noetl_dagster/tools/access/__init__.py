"""What tools reach the outside with: credentials, the keychain, and clients that a process shares.

Gives secrets that stay out of sight, HTTP connections, PostgreSQL pools and buckets to every tool. Stands
on the ground floor.
"""
