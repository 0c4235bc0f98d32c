"""HTTP APIs: E2B, Kubernetes-style, federation, internal, health, metrics.

HTTP status codes exist only here, in no layer below.
"""
