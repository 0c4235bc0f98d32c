"""The Store port and its backends: memory, sqlite, kubernetes.

Independent of what the kinds mean: sandboxes, pools and claims are stored alike.
"""
