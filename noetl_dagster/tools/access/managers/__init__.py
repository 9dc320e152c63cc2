"""Secrets that others keep: AWS Secrets Manager and its parameters, Google's Secret Manager, Kubernetes.

``asking`` asks each for a secret once a minute at most, off the event loop. Gives the value behind a handle to
credentials. Stands on the ground floor.
"""
