"""What talks to a Kubernetes cluster, against a stand-in for one."""
