"""Attempts as Jobs of Kubernetes clusters; needs the extra `k8s`."""
