"""Sandboxes on this machine: namespaces, overlay roots, cgroups, addresses, checkpoints.

The node process lives here.
"""
