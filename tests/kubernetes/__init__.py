"""The platform on Kubernetes, without a cluster."""
