"""Pods of sandboxes: rendered, created, watched, and changed while they run."""
