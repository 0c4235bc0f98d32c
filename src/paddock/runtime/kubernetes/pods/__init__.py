"""Pods of sandboxes: rendering, creation, watching, and changes to running pods."""
