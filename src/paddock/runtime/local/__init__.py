"""The `local` driver: sandboxes on this machine, run by the node process.

`driver.py` is the client in the control plane; the other packages are parts of the node.
"""
