"""Serves kernels by E2B's protocol: lines of JSON at port 49999."""
