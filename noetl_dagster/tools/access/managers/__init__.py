"""Secret managers: AWS Secrets Manager and parameters, Google's Secret Manager, Kubernetes.

``asking`` asks each for a secret at most once a minute, off the event loop.
"""
