"""The Store port and its backends: memory, sqlite, kubernetes.

Nothing here knows what a sandbox is for.
"""
